"""`kvrelay checklist run`: on evidence that lies in folders, and on tiers that are measured while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.edge.stores import object as stored
from kvrelay.edge.stores.file import FileStore
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.server import StoreServer
from kvrelay.edge.stores.wrappers import Slow
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec

REAL_RUN = Path(__file__).parents[2] / "docs" / "evidence" / "replay-on-vllm"
DRILLS = ("worker-loss", "hot-prefix", "gap-inner", "stale-session", "rotation-revision", "rolling-update")


def checklist(*arguments: object) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit status, items by code, and what was said."""
    result = CliRunner().invoke(app, ["checklist", "run", *map(str, arguments), "--json"])
    stages = json.loads(result.stdout)["stages"] if result.stdout.startswith("{") else {}
    return result.exit_code, {one["code"]: one for own in stages.values() for one in own}, result.stderr


def drill_lines(names: Sequence[str], fleet: str = "attached") -> str:
    return "".join(
        json.dumps({"drill": name, "fleet": fleet, "verdict": "pass", "cannot": None, "promises": []},
                   separators=(",", ":")) + "\n"
        for name in names
    )  # fmt: skip


@contextmanager
def peer(latency_s: float) -> Iterator[str]:
    server = StoreServer(Slow(MemoryStore(), latency_s=latency_s))
    try:
        yield f"peer://127.0.0.1:{server.port}"
    finally:
        server.close()


def config(folder: Path, url: str) -> Path:
    file = folder / "kvrelay.toml"
    file.write_text(f'[gateway]\npolicy = "round_robin"\n[[store.tiers]]\nname = "shared"\nurl = "{url}"\n')
    return file


@pytest.mark.covers("OP-01")
def test_six_items_each_with_a_reason_and_links_to_its_evidence(tmp_path: Path) -> None:
    drills = tmp_path / "drills.jsonl"
    drills.write_text(drill_lines([*DRILLS, "store-outage"]))

    status, items, said = checklist("--evidence", REAL_RUN, "--evidence", tmp_path, "--no-probe")

    assert status == 3, items
    assert {code: one["verdict"] for code, one in items.items()} == {
        "mock_then_one_gpu": "unknown",
        "policies_isolated": "pass",
        "one_at_a_time": "pass",
        "six_signals": "pass",
        "five_drills": "pass",
        "gpu_before_clever": "unknown",
    }
    assert items["policies_isolated"]["evidence"] == [str(REAL_RUN)]
    assert items["five_drills"]["evidence"] == [str(drills)]
    assert "hardware is cpu" in items["gpu_before_clever"]["reason"]
    assert "nothing is sent (`--no-probe`)" in said


def test_the_terminal_shows_number_question_reason_evidence_and_what_to_do(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["checklist", "run", "--stage", "redflags", "--evidence", str(tmp_path)])

    assert result.exit_code == 3
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "Red flags"
    assert lines[1].startswith("clear     1. Could KV of one model version")
    assert "          - nothing is shared, so nothing can be mixed" in lines
    assert "unknown   4. Were only warm caches measured?" in lines
    assert "          - there is no report" in lines
    assert any(line.startswith("          to do: kvrelay replay preset:cold_warm_restart") for line in lines)
    assert lines[-1] == "verdict: unknown (2 pass, 3 unknown)"


@pytest.mark.covers("OP-05", "OP-02")
def test_a_far_tier_and_one_that_loses_to_computing_are_red_and_a_near_one_is_not(tmp_path: Path) -> None:
    known = ("--stage", "redflags", "--evidence", tmp_path, "--kv-bytes-per-token", 1000)
    with peer(0.0) as near, peer(0.02) as far:
        good = checklist(*known, "-c", config(tmp_path, near), "--prefill-tokens-per-s", 2000)[1]["remote_slower"]
        losing = checklist(*known, "-c", config(tmp_path, near), "--prefill-tokens-per-s", 1e12)[1]["remote_slower"]
        status, items, _ = checklist(*known, "-c", config(tmp_path, far), "--prefill-tokens-per-s", 2000)

    assert good["verdict"] == "pass" and "it pays from" in good["reason"], good
    assert losing["verdict"] == "fail" and "fetching never pays" in losing["reason"], losing
    assert status == 1 and items["remote_slower"]["verdict"] == "fail"
    assert "another datacentre or region" in items["remote_slower"]["reason"]
    assert items["remote_slower"]["evidence"] == [far]


@pytest.mark.covers("OP-02")
def test_an_lmcache_deployment_is_judged_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("max_local_cpu_size: 120\nremote_url: lm://127.0.0.1:1\n")

    status, items, _ = checklist(
        "--stage", "prelaunch", "--evidence", tmp_path, "--lmcache", file, "--host-memory", 128, "--no-probe"
    )

    assert status == 1
    assert {code: one["verdict"] for code, one in items.items()} == {
        "architecture": "unknown",
        "memory_cap": "fail",
        "near_network": "unknown",
        "version_isolation": "fail",
    }
    assert items["architecture"]["reason"].startswith("remote store: no run")
    assert items["memory_cap"]["reason"] == "max_local_cpu_size: 128.8 GB of at most 115.1 GB"
    assert "not its revision" in items["version_isolation"]["reason"]


@pytest.mark.covers("OP-08")
def test_objects_of_another_format_are_red(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kv")
    head = bytearray(stored.HEAD_BYTES)
    magic, version = stored.MAGIC, stored.FORMAT_VERSION + 1
    stored._FIXED.pack_into(head, 0, magic, version, 0, 0, bytes(16), bytes(12))
    head[stored._CHECKSUM_AT : stored._HEADER_AT] = stored._head_checksum(memoryview(head))
    store.write(b"k" * 40, [bytes(head)], only_if_absent=True, deadline_s=2.0)

    _, items, _ = checklist(
        "--stage", "redflags", "--evidence", tmp_path, "-c", config(tmp_path, f"file://{tmp_path}/kv")
    )

    found = items["unchecked_upgrade"]
    assert found["verdict"] == "fail"
    assert f"1 of format version {version}, this release reads {version - 1}, of 1 objects looked at" in found["reason"]


@pytest.mark.covers("OP-08", "OP-02")
def test_running_workers_are_asked_for_their_versions(tmp_path: Path) -> None:
    with MockFleet([MockSpec(name="w0"), MockSpec(name="w1")]) as fleet:
        workers = [word for worker in fleet.workers for word in ("--worker", worker.url)]
        _, items, said = checklist("--stage", "redflags", "--evidence", tmp_path, *workers)

    found = items["unchecked_upgrade"]
    assert (found["verdict"], found["evidence"]) == ("pass", ["kvrelay doctor", "built-in defaults"]), found
    assert found["parts"][0].count("kvrelay's own mock worker") == 2
    assert items["memory_limit"]["verdict"] == "pass"  # asked, and no cache in host memory
    assert "; 2 workers; tiers and workers get small probes" in said


@pytest.mark.covers("OP-07", "OP-03")
def test_a_report_without_a_cold_block_is_red_and_a_restart_has_a_limit(tmp_path: Path) -> None:
    def block(name: str, before: str, p95: float) -> dict[str, Any]:
        return {"name": name, "before": before, "requests": 12, "failures": 0, "ttft_ms": {"count": 12, "p95": p95}}

    file = tmp_path / "blocks.json"
    blocks = [block("warm-1", "nothing", 20.0)]
    for added, verdict in ((), "fail"), ((block("cold-1", "reset", 90.0), block("r-1", "restart", 95.0)), "pass"):
        blocks += added
        file.write_text(json.dumps({"label": "x", "sha256": "t", "policies": {"cache_load": blocks}}))
        items = checklist("--stage", "redflags", "--evidence", file.parent)[1]
        assert (items["only_warm"]["verdict"], items["only_warm"]["evidence"]) == (verdict, [str(file)])

    for limit, verdict in ((100, "pass"), (90, "fail")):
        items = checklist("--stage", "postlaunch", "--evidence", tmp_path, "--cold-ttft-ms", limit)[1]
        assert items["cold_start"]["verdict"] == verdict, items["cold_start"]


def test_what_looks_like_evidence_and_is_not_is_named(tmp_path: Path) -> None:
    (tmp_path / "blocks.json").write_text('{"label": 3}')
    status, _, said = checklist("--evidence", tmp_path)
    assert status == 3
    assert f"warning: not read as evidence: {tmp_path}/blocks.json: " in said


def test_wrong_names_are_answered_with_legal_ones(tmp_path: Path) -> None:
    assert checklist("--stage", "prelunch")[0::2] == (
        2,
        "error: unknown stage `prelunch` (from `--stage`)\n"
        "  known stages: `all`, `beginner`, `postlaunch`, `prelaunch`, `redflags`\n"
        "hint: did you mean `prelaunch`?\n",
    )
    status, _, said = checklist("--evidence", tmp_path / "nowhere")
    assert status == 2 and f"error: `{tmp_path}/nowhere` (from `--evidence`) does not exist" in said
