"""What people see when they call the demo wrongly: whole messages and exit statuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cli import messages
from kvrelay.cli.demo import load_trace, policy_names
from kvrelay.cli.tune import weight_vector


def failure(capsys: pytest.CaptureFixture[str], stop: pytest.ExceptionInfo[SystemExit]) -> tuple[object, str]:
    printed = capsys.readouterr()
    assert printed.out == ""
    return stop.value.code, printed.err


def test_unknown_policy_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        policy_names("round_robin, cache_lod")

    assert failure(capsys, stop) == (
        messages.USAGE_ERROR,
        "error: unknown policy `cache_lod` (from `--policies`)\n"
        "  known policies: `cache_load`, `least_load`, `random`, `round_robin`, `sticky`, `sticky_load`\n"
        "hint: did you mean `cache_load`?\n",
    )
    assert policy_names(" sticky,cache_load,sticky") == ("sticky", "cache_load")


def test_missing_and_foreign_trace_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        load_trace(tmp_path / "nix.jsonl")
    code, printed = failure(capsys, stop)
    assert code == messages.USAGE_ERROR
    assert printed == (
        f"error: cannot read trace `{tmp_path}/nix.jsonl`: No such file or directory\n"
        "hint: without `--trace` the bundled agent sessions are used\n"
    )

    path = tmp_path / "rows.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 6000, "output_length": 5, "hash_ids": []}\n')
    with pytest.raises(SystemExit) as stop:
        load_trace(path)
    assert failure(capsys, stop) == (
        messages.USAGE_ERROR,
        f"error: `{path}`, line 1: 0 hash_ids for input_length 6000\n"
        "  needed: the number of blocks of one size for all rows, or the size told (8 to 4096 tokens); "
        "it is not guessed, because reuse depends on it\n"
        f"hint: kvrelay trace convert {path} --block-size 16 --out told.jsonl, and then use that file\n",
    )


def test_a_trace_without_block_ids_is_no_trace_for_policies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")

    with pytest.raises(SystemExit) as stop:
        load_trace(path)

    assert failure(capsys, stop) == (
        messages.USAGE_ERROR,
        f"error: `{path}`, line 1: no block ids, so no prompt shares anything\n  legal: a trace with block ids\n",
    )


def test_bad_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        weight_vector("1,2,x,4")

    assert failure(capsys, stop) == (
        messages.USAGE_ERROR,
        "error: `weights` is `1,2,x,4` (from `--weights`)\n"
        "  legal: four numbers alpha,beta,gamma,delta, each from 0 to 1e6, such as 1,0.002,0.005,0.05\n",
    )
    assert weight_vector("1,0.5,0,0").name == "1,0.5,0,0"
