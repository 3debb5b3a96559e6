"""`kvrelay plan` and `kvrelay verdict`: what is closed, what is written, what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.core.gates.gate_file import parse_gates
from kvrelay.lab.arms.gate_store import lock_gates, read_gates
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.settings import RunSettings
from tests.lab.made_up_run import TIER_ARMS, made_up_measured, write_run

MEASURED = made_up_measured(settings=RunSettings(contenders=TIER_ARMS))
GATES = """
title = "router"
candidate = "cache_load"
baseline = "round_robin"
baseline_run = "this-run"

[[gate]]
name = "waiting falls"
paired = "ttft_ms"
at_most_ratio = 1.0
"""


def kvrelay(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


def judged_router_run(folder: Path) -> None:
    """Three policies with gates that were locked before the first request, on mock workers."""
    folder.mkdir(parents=True)
    (folder / "gates.toml").write_text(GATES)
    lock_gates(folder / "gates.toml")
    store = read_gates(folder / "gates.toml")
    measured = made_up_measured(settings=RunSettings(), gates=parse_gates(GATES.encode()))
    write_run(_stating(measured, store), folder)


def _stating(measured: Measured, store: object) -> Measured:
    from msgspec import structs

    manifest = measured.manifest
    late = tuple(structs.replace(one, started_s=4e9 + number) for number, one in enumerate(manifest.observed))
    stated = structs.replace(manifest.stated, gates=store.facts())  # type: ignore[attr-defined]
    return structs.replace(measured, manifest=structs.replace(manifest, stated=stated, observed=late))


@pytest.mark.covers("OP-12")
def test_a_later_step_is_refused_until_the_one_before_kept_its_gates(tmp_path: Path) -> None:
    evidence = tmp_path / "runs"
    evidence.mkdir()
    code, page, errors = kvrelay("plan", "make", "tiers", "--evidence", evidence, "--out", tmp_path / "plan")
    assert (code, page) == (1, "")
    assert errors == (
        "error: `tiers` comes later (order: router, cpu, remote, split)\n"
        "  not shown yet: router: no run judges it\n"
        "hint: kvrelay plan show --evidence DIR; `--rehearsal` lets runs on mock workers count\n"
    )
    assert not (tmp_path / "plan").exists()

    judged_router_run(evidence / "router")
    assert kvrelay("plan", "check", "cpu", "--evidence", evidence)[0] == 1  # mock: a rehearsal
    code, page, errors = kvrelay("plan", "check", "cpu", "--evidence", evidence, "--rehearsal")
    assert (code, errors) == (0, ""), errors
    assert page.startswith("cpu: may be tried (router: `cache_load` against `round_robin`: gates pass")
    assert kvrelay("plan", "check", "remote", "--evidence", evidence, "--rehearsal")[0] == 1

    write_run(MEASURED, evidence / "tiers")
    assert kvrelay("plan", "check", "split", "--evidence", evidence, "--rehearsal")[0] == 0
    shown = json.loads(kvrelay("plan", "show", "--evidence", evidence, "--rehearsal", "--json")[1])
    assert [(step["stage"], step["open"], step["shown"]["verdict"]) for step in shown] == [
        ("router", True, "pass"), ("cpu", True, "pass"), ("remote", True, "pass"), ("split", True, "unknown"),
    ]  # fmt: skip


@pytest.mark.covers("TR-02", "OP-12")
def test_the_plan_is_written_and_says_how_to_carry_it_out(tmp_path: Path) -> None:
    judged_router_run(tmp_path / "router")
    out = tmp_path / "plan"
    code, page, errors = kvrelay(
        "plan", "make", "tiers", "--evidence", tmp_path, "--rehearsal", "--out", out, "--policy", "sticky"
    )

    assert code == 0, errors
    assert page.splitlines()[:4] == [
        "9 measurements under `sticky` on mock workers:",
        "  gpu             cold, warm, restart",
        "  gpu+cpu         cold, warm, restart",
        "  gpu+cpu+remote  cold, warm, restart",
    ]
    assert len(json.loads((out / "plan.json").read_bytes())["cells"]) == 9
    assert kvrelay("arms", "check", out / "arms.toml")[0] == 0


@pytest.mark.covers("TR-08")
def test_a_verdict_of_the_arms_that_differ_in_the_tier(tmp_path: Path) -> None:
    write_run(MEASURED, tmp_path)
    code, page, errors = kvrelay("verdict", tmp_path)
    assert code == 0, errors
    assert page.startswith(
        f"KEEP remote: gpu+cpu+remote of {tmp_path} against gpu+cpu of {tmp_path}\n"
        "  mock workers: modelled times, not the performance of any engine\n"
    )
    found = json.loads(kvrelay("verdict", tmp_path, "--tier", "cpu", "--json")[1])
    assert (found["decision"], found["tier"], found["label"]) == ("keep", ["cpu"], "mock")

    code, _, errors = kvrelay("verdict", tmp_path, "--candidate", "gpu+cpu+remote", "--baseline", "gpu")
    assert code == 2 and "has cpu and remote beyond `gpu`" in errors
    code, _, errors = kvrelay("verdict", tmp_path, "--candidate", "gpu+gpu")
    assert code == 2 and "did you mean `gpu+cpu`" in errors
    assert kvrelay("verdict", tmp_path / "nowhere")[0] == 2


@pytest.mark.covers("TR-08")
def test_a_run_of_one_tier_has_no_remote_verdict(tmp_path: Path) -> None:
    write_run(made_up_measured(settings=RunSettings(contenders=TIER_ARMS[:2])), tmp_path)
    code, _, errors = kvrelay("verdict", tmp_path)
    assert code == 2
    assert errors.startswith(f"error: `{tmp_path}` has no two arms that differ in one tier (arms: gpu, gpu+cpu)")


@pytest.mark.covers("TR-10")
def test_flags_for_sglang_come_after_a_look_at_the_memory() -> None:
    known = ("plan", "hicache", "--device-pool-tokens", 100_000, "--kv-bytes-per-token", 131_072)

    code, page, errors = kvrelay(*known, "--free-memory", 64)
    assert (code, page) == (
        0,
        "--page-size 64 --enable-hierarchical-cache --hicache-ratio 2 --hicache-io-backend kernel "
        "--hicache-write-policy write_through\n",
    )
    assert errors == "host memory: 1 pool needs 24.4 GiB, 64.0 GiB are free and 10.0 of them stay so: fits\n"

    code, page, errors = kvrelay(*known, "--free-memory", 30)
    assert (code, page) == (1, "")
    assert errors.splitlines()[-1] == "hint: a ratio of at most 1.64 fits"

    code, _, errors = kvrelay(*known, "--io-backend", "kernal")
    assert code == 2
    assert errors == "error: `io_backend` is `kernal` (from `--io-backend`)\n  legal: kernel, direct, kernel_ascend\n"


def test_wrong_names_are_answered_with_legal_ones(tmp_path: Path) -> None:
    assert kvrelay("plan", "make", "teirs")[2].endswith("hint: did you mean `tiers`?\n")
    assert kvrelay("plan", "check", "remotes")[2].endswith("hint: did you mean `remote`?\n")
    assert kvrelay("plan", "make", "tiers", "--engine", "sglan")[2].endswith("hint: did you mean `sglang`?\n")
    assert "did you mean `cache_load`" in kvrelay("plan", "make", "tiers", "--policy", "cache_lod")[2]
    assert kvrelay("plan", "make", "tiers", "--remote", "redis//x")[0] == 2
