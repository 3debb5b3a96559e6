"""The demo as a user starts it: one command, and afterwards nothing of it is left but its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.lab.arms.arm import is_primer, read_receipts

POLICIES = ("round_robin", "sticky", "cache_load")


def command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "kvrelay.cli.main", "demo", "--repeats", "1", "--out", str(out), *more]


def parentage(stat: Path) -> tuple[int, int] | None:
    """A process and its parent; None when it ended meanwhile."""
    try:
        text = stat.read_text()
    except OSError:
        return None
    return int(text.split(maxsplit=1)[0]), int(text.rpartition(")")[2].split()[1])


def children_of(pid: int) -> set[int]:
    """All processes below `pid`, however deep."""
    parents = dict(filter(None, map(parentage, Path("/proc").glob("[0-9]*/stat"))))
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    """One real run with one repeat: four workers and a gateway per policy."""
    ended = subprocess.run(command(out, "--json"), capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)  # nothing but the object is on stdout


@pytest.mark.covers("MK-04", "BM-20", "BM-30")
def test_every_arm_had_its_own_processes_and_left_none(result: dict[str, Any]) -> None:
    observed = result["manifest"]["observed"]
    pids = [process["pid"] for arm in observed for process in arm["processes"]]
    incarnations = [
        process["incarnation"] for arm in observed for process in arm["processes"] if process["incarnation"]
    ]

    assert len(observed) == 3 and len(pids) == len(set(pids)) == 3 * 5
    assert len(incarnations) == len(set(incarnations)) == 3 * 4
    assert [arm["index_blocks_at_start"] for arm in observed] == [0, 0, 0]
    assert [arm["leftovers"] for arm in observed] == [[], [], []]
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.covers("RC-11", "BM-24")
def test_every_request_has_exactly_one_receipt_and_one_sample(result: dict[str, Any], out: Path) -> None:
    receipts = [receipt for receipt in read_receipts(out / "receipts.jsonl") if not is_primer(receipt)]
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    planned = result["manifest"]["stated"]["plan"]["requests"]

    ids = [receipt.request_id for receipt in receipts]
    assert len(ids) == len(set(ids)) == len(samples) == 3 * planned
    assert set(ids) == {sample["request_id"] for sample in samples}
    for figures in result["policies"].values():
        assert (figures["requests"], figures["failures"]) == (planned, 0)
        assert figures["ttft_ms"]["count"] == planned
        assert (figures["requests_without_usage"], figures["usage_disagreements"]) == (0, 0)


def accounted(receipt: Receipt) -> int:
    assert receipt.gate_loss_tokens is not None and receipt.actual_cached_tokens is not None
    return receipt.gate_loss_tokens.total + receipt.actual_cached_tokens


@pytest.mark.covers("RT-01", "RC-16")
def test_every_eligible_token_was_hit_or_lost_at_one_gate(result: dict[str, Any], out: Path) -> None:
    receipts = read_receipts(out / "receipts.jsonl")

    assert {receipt.manifest_digest for receipt in receipts} == {result["manifest"]["digest"]}
    assert [r.request_id for r in receipts if accounted(r) != r.eligible_prefix_tokens] == []


@pytest.mark.covers("RT-25")
def test_cache_aware_routing_hits_more_and_stays_balanced(result: dict[str, Any]) -> None:
    """Tokens are exact enough for one repeat; times are compared by the demo itself, over three."""
    by_policy = result["policies"]

    assert by_policy["cache_load"]["actual_cached_tokens"] >= 1.2 * by_policy["round_robin"]["actual_cached_tokens"]
    assert by_policy["cache_load"]["max_over_mean_load"] < by_policy["sticky"]["max_over_mean_load"]
    assert by_policy["cache_load"]["recomputed_tokens"] < by_policy["round_robin"]["recomputed_tokens"]
    assert result["label"] == "mock"


def test_folder_holds_what_was_promised(result: dict[str, Any], out: Path) -> None:
    assert {"manifest.json", "receipts.jsonl", "samples.jsonl", "report.html", "summary.json"} <= {
        path.name for path in out.iterdir()
    }
    assert json.loads((out / "summary.json").read_bytes()) == result
    assert json.loads((out / "manifest.json").read_bytes()) == result["manifest"]


def started_demo(out: Path) -> tuple[subprocess.Popen[str], set[int]]:
    """A demo in the middle of its first arm, in a process group of its own, and the processes below it."""
    # Who runs the tests in a shell's background hands down that Ctrl-C is to be ignored; a terminal does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(
        command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    signal.signal(signal.SIGINT, before)
    samples, deadline = out / "samples.jsonl", time.monotonic() + 30
    while not samples.exists() or not samples.stat().st_size:
        assert time.monotonic() < deadline and running.poll() is None, running.communicate()
        time.sleep(0.05)
    below = children_of(running.pid)
    assert len(below) >= 5
    return running, below


@pytest.mark.covers("BM-30")
@pytest.mark.parametrize(
    ("number", "status", "whole_group"), [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)]
)
def test_interrupted_run_leaves_no_process(
    tmp_path: Path, number: signal.Signals, status: int, whole_group: bool
) -> None:
    """Ctrl-C in a terminal reaches the whole foreground group, `kill` only the command."""
    running, below = started_demo(tmp_path)
    (os.killpg if whole_group else os.kill)(running.pid, number)
    printed, said = running.communicate(timeout=30)

    assert (running.returncode, printed) == (status, ""), said
    assert "stopped" in said and "Traceback" not in said
    assert not [pid for pid in below if alive(pid)]


@pytest.mark.covers("BM-30")
def test_killed_run_leaves_no_process(tmp_path: Path) -> None:
    running, below = started_demo(tmp_path)
    running.kill()
    running.communicate(timeout=30)

    deadline = time.monotonic() + 10
    while left := [pid for pid in below if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
