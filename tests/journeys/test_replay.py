"""A replay over workers that run already, as a user starts it: arms share their caches unless they are emptied."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec

SMALL = (
    "--repeats", "1", "--max-sessions", "4", "--max-turns", "3", "--block-tokens", "16", "--speed", "300",
    "--max-gap-ms", "20", "--max-output-tokens", "2", "--policy", "round_robin", "--policy", "sticky",
)  # fmt: skip
GATES = """
title = "sticky instead of round robin"
candidate = "sticky"
baseline = "round_robin"
baseline_run = "this-run"
[[gate]]
name = "nobody fails"
metric = "failed_requests"
at_most = 0
"""


@pytest.fixture(scope="module")
def fleet_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    specs = [MockSpec(name=name, blocks=8000, prefill_tokens_per_s=200_000, decode_ms=1) for name in "ab"]
    path = tmp_path_factory.mktemp("fleet") / "fleet.toml"
    with MockFleet(specs) as fleet:
        path.write_text("".join(f'[[workers]]\nname = "{one.name}"\nurl = "{one.url}"\n' for one in fleet.workers))
        yield path


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments], prog_name="kvrelay")
    return result.exit_code, result.stdout, result.stderr


def replayed(fleet: Path, out: Path, reset: str, *more: object) -> tuple[int, dict[str, Any]]:
    """In a process of its own, as its gateways are."""
    command = [sys.executable, "-m", "kvrelay.cli.main", "replay", "bundled", "--fleet", fleet, "--out", out]
    command += ["--reset", reset, "--json", *SMALL, *more]
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=110, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.covers("S46", "BM-20")
def test_a_second_arm_without_a_reset_is_flagged_with_the_workers_own_hits(fleet_file: Path, tmp_path: Path) -> None:
    code, result = replayed(fleet_file, tmp_path, "none")
    first, second = result["manifest"]["observed"]

    assert code == 0
    assert (first["isolation"]["state"], second["isolation"]["state"]) == ("clean", "contaminated")
    assert "the workers' own counters say" in second["isolation"]["reason"]
    assert second["isolation"]["engine_hit_ratio"] > first["isolation"]["engine_hit_ratio"]
    report = (tmp_path / "report.md").read_text()
    assert "sticky-0 is contaminated" in report and "reset between arms: none" in report


@pytest.mark.covers("S46", "BM-10", "BM-18", "BM-21", "BM-22", "GT-01", "GT-08", "GT-10")
def test_with_a_reset_both_are_clean_and_a_deleted_failure_is_found_later(fleet_file: Path, tmp_path: Path) -> None:
    gates, out = tmp_path / "gates.toml", tmp_path / "out"
    gates.write_text(GATES)
    assert call("gates", "lock", gates)[0] == 0
    code, result = replayed(fleet_file, out, "reset_prefix_cache", "--gates", gates)
    arms, verdict = result["manifest"]["observed"], result["gates"]

    assert [arm["isolation"]["state"] for arm in arms] == ["clean", "clean"], arms
    assert [arm["isolation"]["first_request_hit_tokens"] for arm in arms] == [0, 0]
    assert [arm["index_blocks_at_start"] for arm in arms] == [0, 0]
    assert len({arm["schedule_sha256"] for arm in arms}) == 1
    assert {arm["primer_sha256"] for arm in arms} == {result["manifest"]["stated"]["plan"]["primer_sha256"]}
    primer_requests = result["manifest"]["stated"]["settings"]["primer_prompts_per_worker"] * 2
    assert [arm["receipts"] - arm["samples"] for arm in arms] == [primer_requests] * 2  # in the log, and in no figure
    assert (code, verdict["verdict"], verdict["registration"]) == (3, "unknown", "registered")
    assert verdict["promotion"] == "not_promotable"
    assert verdict["reasons"][0] == "insufficient evidence: 1 of at least 3 repeats"
    for moment in ("metrics_before", "metrics_after"):
        assert sorted(page.name for page in (out / "arms" / "sticky-0" / moment).iterdir()) == ["a.prom", "b.prom"]

    samples = (out / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (out / "samples.jsonl").write_bytes(b"".join(samples[:-1]))  # the last one belongs to sticky
    code, printed, _ = call("report", out, "--json")
    again = json.loads(printed)["gates"]
    assert code == 1 and again["verdict"] == "fail"
    assert any("1 planned requests left no sample" in reason for reason in again["reasons"])

    (out / "gates.toml").write_text(GATES.replace("at_most = 0", "at_most = 9"))
    assert json.loads(call("report", out, "--json")[1])["gates"]["registration"] == "changed"
