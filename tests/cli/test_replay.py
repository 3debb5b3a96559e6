"""What the commands around a replay say to calls that they cannot take, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app
from tests.lab.made_up_run import made_up_measured

GATES = """
title = "t"
candidate = "cache_load"
baseline = "round_robin"
baseline_run = "this-run"
[[gate]]
name = "nobody fails"
metric = "failed_requests"
at_most = 0
"""


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments], prog_name="kvrelay")
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    path = tmp_path / "gates.toml"
    path.write_text(GATES)
    return path


@pytest.mark.covers("GT-01")
def test_gates_are_checked_locked_and_found_changed(gates: Path) -> None:
    head = (
        f"{gates}: 1 gate, cache_load against round_robin, baseline run this-run\n"
        "  nobody fails\n"
        "  and, whatever the file says: no more failures and no fewer successful tasks than the baseline\n"
    )
    not_locked = f"not locked: a run with them is not pre-registered\nhint: kvrelay gates lock {gates}\n"
    assert call("gates", "check", gates) == (3, head + not_locked, "")

    code, out, _ = call("gates", "lock", gates, "--json")
    lock = json.loads(out)
    assert code == 0 and len(lock["sha256"]) == 64
    assert call("gates", "lock", gates) == (0, f"{gates}: locked at {lock['locked_at']}, sha256 {lock['sha256']}\n", "")
    locked = f"locked at {lock['locked_at']}, sha256 {lock['sha256']}\n"
    assert call("gates", "check", gates) == (0, head + locked, "")

    gates.write_text(GATES.replace("at_most = 0", "at_most = 9"))
    changed = f"changed since it was locked at {lock['locked_at']}: a run with them is not pre-registered\n"
    assert call("gates", "check", gates) == (3, head + changed, "")


def test_a_gate_file_that_cannot_be_used_says_where_and_what_is_nearest(gates: Path) -> None:
    gates.write_text(GATES.replace("failed_requests", "failed_request"))
    code, _, talk = call("gates", "check", gates)
    assert code == 2
    assert talk.startswith(
        f"error: gate `nobody fails`, `metric`: `failed_request` (from `{gates}`)\n  legal: `ttft_p50_ms`"
    )
    assert talk.endswith("hint: did you mean `failed_requests`?\n")

    code, _, talk = call("gates", "check", gates.with_name("none.toml"))
    assert (code, talk) == (2, f"error: cannot use gates `{gates.with_name('none.toml')}`: No such file or directory\n")


@pytest.mark.covers("GT-07", "BM-32")
def test_a_baseline_that_is_not_the_cited_run_is_refused(gates: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    manifest = made_up_measured().manifest
    (run / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    gates.write_text(GATES.replace("this-run", manifest.digest[:16]))
    assert call("gates", "check", gates, "--baseline", run)[0] == 3  # not locked, and nothing else

    gates.write_text(GATES.replace("this-run", "0" * 16))
    code, _, talk = call("gates", "check", gates, "--baseline", run)
    assert code == 1
    assert talk.startswith(f"error: the gates cite baseline run `{'0' * 16}`, `{run}` is run `{manifest.digest}`\n")


@pytest.mark.covers("BM-01")
def test_manifest_check_and_merge_end_as_they_find(tmp_path: Path) -> None:
    whole = msgspec.json.decode(msgspec.json.encode(made_up_measured().manifest))
    for name, digest in (("a", "a" * 64), ("b", "b" * 64)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(msgspec.json.encode({**whole, "digest": digest}))
    assert call("manifest", "check", tmp_path / "a") == (0, f"{tmp_path / 'a'}: whole\n", "")
    code, out, _ = call("manifest", "merge", tmp_path / "a", tmp_path / "b")
    assert code == 0 and json.loads(out)["merged_from"] == ["a" * 64, "b" * 64]

    del whole["observed"][0]["processes"][1]["log"]
    (tmp_path / "b" / "manifest.json").write_bytes(msgspec.json.encode(whole))
    code, _, talk = call("manifest", "check", tmp_path / "b")
    gap = "observed[round_robin-0].processes[mock-0].log: missing"
    assert (code, talk) == (1, f"error: {tmp_path / 'b'} is not whole\n  {gap}\n")
    assert call("manifest", "merge", tmp_path / "a", tmp_path / "b")[0] == 1


@pytest.mark.covers("BM-25")
def test_arms_diff_ends_with_1_when_more_than_the_policy_differs(tmp_path: Path) -> None:
    left, right, third = (tmp_path / f"{name}.toml" for name in "abc")
    left.write_text('[gateway]\nport = 1\npolicy = "sticky"\n')
    right.write_text('[gateway]\nport = 2\npolicy = "cache_load"\n')
    third.write_text('[gateway]\npolicy = "cache_load"\n[retry]\nattempts = 9\n')

    assert call("arms", "diff", left, right) == (0, "router: gateway.policy: `sticky` -> `cache_load`\n", "")
    assert call("arms", "diff", left, left) == (0, "the configurations do not differ\n", "")
    code, out, talk = call("arms", "diff", left, third)
    assert (code, talk) == (1, "error: the configurations differ in more than the router's policy: retry.attempts\n")
    assert out.endswith("retry: retry.attempts: not set -> `9`\n")


@pytest.mark.covers("BM-26")
def test_arms_check_refuses_two_factors_at_once(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    step = '[[contender]]\nname = "{}"\nset = {{ "gateway.policy" = "{}", "retry.attempts" = {} }}\n'
    plan.write_text(step.format("a", "sticky", 1) + step.format("b", "cache_load", 2))

    assert call("arms", "check", plan) == (
        1,
        "",
        "error: these contenders cannot be compared: `a` and `b` differ in 2 factors: retry, router\n"
        "  legal: neighbours differ in exactly one factor\n",
    )
    plan.write_text(step.format("a", "sticky", 1) + step.format("b", "cache_load", 1))
    assert call("arms", "check", plan) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "talk"),
    [
        (
            ["--policy", "cache_lod"],
            "error: unknown policy `cache_lod` (from `--policy`)\n"
            "  known policies: `cache_load`, `least_load`, `random`, `round_robin`, `sticky`, `sticky_load`\n"
            "hint: did you mean `cache_load`?\n",
        ),
        (
            ["--reset", "cache_salt"],
            "error: `--reset` is `cache_salt` (from the command line)\n  legal for mock workers: `fresh_processes`\n",
        ),
        (
            ["--order", "latn"],
            "error: unknown order `latn` (from `--order`)\n"
            "  known orders: `abba`, `latin`\n"
            "hint: did you mean `latin`?\n",
        ),
        (["--fleet", "none.toml"], "error: cannot use fleet `none.toml`: No such file or directory\n"),
    ],
)
def test_replay_says_what_would_have_been_legal(arguments: list[str], talk: str) -> None:
    assert call("replay", "bundled", *arguments) == (2, "", talk)


def test_gates_on_an_arm_that_does_not_run_are_refused(gates: Path) -> None:
    code, _, talk = call("replay", "bundled", "--policy", "round_robin", "--policy", "sticky", "--gates", gates)
    assert (code, talk) == (
        2,
        f"error: unknown arm `cache_load` (from `{gates}`)\n  known arms: `round_robin`, `sticky`\n",
    )


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    assert call("report", tmp_path) == (
        2,
        "",
        f"error: no run can be read there: {tmp_path / 'manifest.json'}: No such file or directory\n"
        "hint: name the folder that `--out` of a replay or demo named\n",
    )
