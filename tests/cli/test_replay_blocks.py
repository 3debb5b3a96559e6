"""`kvrelay replay preset:cold_warm_restart`: blocks through a real gateway over real mock workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.cli.messages import replay_blocks as words
from kvrelay.core.stats.distribution import Distribution
from kvrelay.lab.arms.blocks import Block
from kvrelay.lab.replay.sample_log import read_samples

NAMES = ["cold-1", "warm-1", "restart-1", "cold-2", "warm-2", "restart-2"]


@pytest.mark.covers("BM-11")
def test_three_labelled_blocks_twice_each_with_its_own_preparation(tmp_path: Path) -> None:
    arguments = ["replay", "preset:cold_warm_restart", "--policy", "cache_load", "--workers", "1", "--json"]

    result = CliRunner().invoke(app, [*arguments, "--speed", "40", "--max-output-tokens", "1", "--out", str(tmp_path)])

    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["label"], found["workers"]) == ("cold_warm_restart", "mock")
    blocks = found["policies"]["cache_load"]
    assert [block["name"] for block in blocks] == NAMES
    assert [block["before"] for block in blocks] == ["reset", "nothing", "restart"] * 2
    assert {(block["requests"], block["failures"]) for block in blocks} == {(12, 0)}
    for block in blocks:
        assert (block["hit_share"] > 0.5) if block["name"].startswith("warm") else block["cached_tokens"] == 0
    samples = read_samples(tmp_path / "samples.jsonl")
    assert [sample.phase for sample in samples] == [name for name in NAMES for _ in range(12)]
    assert json.loads((tmp_path / "blocks.json").read_bytes()) == found


def test_blocks_are_no_arms() -> None:
    result = CliRunner().invoke(app, ["replay", "preset:cold_warm_restart", "--fleet", "fleet.toml"])

    assert result.exit_code == 2
    assert result.stderr == (
        "error: `--fleet` is `fleet.toml`, and `preset:cold_warm_restart` is a replay in blocks\n"
        "  blocks run on mock workers, which can be emptied and started again, and are compared with each other\n"
        "hint: any other trace can be replayed on a fleet and judged by gates\n"
    )


def block(name: str, before: str, *, failures: int = 0, cached: int | None = 0) -> Block:
    times = Distribution(12, 40.0, 60.0, 60.0, 41.0, 60.0)
    return Block(name, before, 12, failures, 0, 12288, cached, times)  # type: ignore[arg-type]


def test_a_cold_block_that_hit_something_is_a_complaint() -> None:
    found = {
        "sticky": [block("cold-1", "reset", cached=64), block("warm-1", "nothing", failures=2, cached=None)],
    }

    assert words.complaints(found) == [
        "sticky, cold-1: 64 tokens were hit although caches emptied before it",
        "sticky, warm-1: 2 requests failed",
    ]
    assert words.blocks("preset:x", found, "out").splitlines()[3:6] == [
        "sticky          before it                requests  failed     hits  p50 ttft ms      p95",
        "cold-1          caches emptied                 12       0     0.5%         40.0     60.0",
        "warm-1          caches kept                    12       2  unknown         40.0     60.0",
    ]


@pytest.mark.covers("TR-02", "TR-11")
def test_arms_with_tiers_hit_after_a_restart_begin_empty_and_leave_nothing_behind(tmp_path: Path) -> None:
    arms = tmp_path / "arms.toml"
    kv = tmp_path / "kv"
    arms.write_text(
        '[[contender]]\nname = "gpu+remote"\nset = { "gateway.policy" = "cache_load" }\n'
        f'store = {{ tiers = [ {{ url = "file://{kv}" }} ], deadline_ms = 10_000, break_even = false }}\n'
    )
    arguments = ["replay", "preset:cold_warm_restart", "--arms", str(arms), "--workers", "1", "--json"]

    result = CliRunner().invoke(
        app, [*arguments, "--speed", "40", "--max-output-tokens", "1", "--out", str(tmp_path / "out")]
    )

    assert result.exit_code == 0, result.stderr
    (blocks,) = json.loads(result.stdout)["policies"].values()
    shares = {block["name"]: block["hit_share"] for block in blocks}
    assert shares["cold-1"] == shares["cold-2"] == 0.0
    assert min(shares["restart-1"], shares["restart-2"]) > 0.5  # of which an arm without tiers hits nothing
    assert not [file for file in (kv / "objects").rglob("*") if file.is_file()]


def test_hits_after_a_restart_are_a_complaint_only_without_tiers() -> None:
    found = {"a": [block("restart-1", "restart", cached=64)], "b": [block("restart-1", "restart", cached=64)]}

    assert words.complaints(found, with_tiers=["b"]) == [
        "a, restart-1: 64 tokens were hit although workers started again before it"
    ]
