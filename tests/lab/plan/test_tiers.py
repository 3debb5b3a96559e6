"""The plan of a tier experiment: which arms, in which blocks, and nothing but the tier between them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from kvrelay.edge.connectors.tiering import HICACHE, OURS, implementations
from kvrelay.edge.connectors.vllm.kv.settings import read_settings
from kvrelay.lab.arms.contender import Contender, differences, plan_problems
from kvrelay.lab.arms.contender_file import read_contenders
from kvrelay.lab.plan.tiers import Cell, Wanted, tier_plan, write_plan


def wanted(engine: str, step: str = "tiers", remote: str = "valkey://127.0.0.1:6379/0") -> Wanted:
    return Wanted(step=step, policy="cache_load", engine=engine, cpu_bytes=10**9, remote=remote)


@pytest.mark.covers("TR-02")
@pytest.mark.parametrize(("engine", "remote"), [("mock", "file:///kv"), ("vllm", "s3://b/p"), ("sglang", "mooncake")])
def test_exactly_three_arms_times_cold_warm_restart_with_the_policy_fixed(
    tmp_path: Path, engine: str, remote: str
) -> None:
    plan = tier_plan(wanted(engine, remote=remote), out=tmp_path)

    assert plan.cells == tuple(
        Cell(arm, block) for arm in ("gpu", "gpu+cpu", "gpu+cpu+remote") for block in ("cold", "warm", "restart")
    )
    assert {tuple(arm.sets.items()) for arm in plan.arms} == {(("gateway.policy", "cache_load"),)}
    assert plan_problems(plan.arms) == ()
    for one, other in zip(plan.arms, plan.arms[1:], strict=False):
        assert {found.factor for found in differences(one.flat(), other.flat())} == {"store"}


@pytest.mark.covers("TR-02", "OP-12")
@pytest.mark.parametrize(("step", "names"), [("cpu", ["gpu", "gpu+cpu"]), ("remote", ["gpu+cpu", "gpu+cpu+remote"])])
def test_a_single_step_has_two_arms(tmp_path: Path, step: str, names: list[str]) -> None:
    assert [arm.name for arm in tier_plan(wanted("mock", step), out=tmp_path).arms] == names


@pytest.mark.covers("TR-02")
def test_what_is_written_is_what_a_replay_reads(tmp_path: Path) -> None:
    plan = tier_plan(wanted("mock", remote=f"file://{tmp_path}/kv"), out=tmp_path)

    write_plan(plan, tmp_path)

    assert read_contenders(tmp_path / "arms.toml") == plan.arms
    assert [len((arm.store or {"tiers": ()})["tiers"]) for arm in plan.arms] == [0, 1, 2]
    assert plan.commands[0] == (
        f"kvrelay replay preset:cold_warm_restart --arms {tmp_path}/arms.toml --out {tmp_path}/blocks"
    )


@pytest.mark.covers("TR-02")
def test_real_workers_get_a_store_file_or_flags_for_each_arm(tmp_path: Path) -> None:
    vllm = tier_plan(wanted("vllm"), out=tmp_path)
    write_plan(vllm, tmp_path)

    assert [implementations(arm.engine_args) for arm in vllm.arms] == [(), (OURS,), (OURS,)]
    store = tomllib.loads((tmp_path / "store-gpu+cpu+remote.toml").read_text())["store"]
    assert [tier["url"] for tier in store["tiers"]] == ["memory://kvrelay-plan", "valkey://127.0.0.1:6379/0"]

    settings = read_settings(json.loads(vllm.arms[2].engine_args[1])["kv_connector_extra_config"])
    assert settings.config == str(tmp_path / "store-gpu+cpu+remote.toml")
    assert all("--reset cache_salt" in line for line in vllm.commands if line.startswith("kvrelay replay"))

    sglang = tier_plan(wanted("sglang", remote="mooncake"), out=tmp_path)
    assert sglang.arms[0].engine_args == ("--page-size", "64")  # the same in all arms
    assert [implementations(arm.engine_args) for arm in sglang.arms] == [(), (HICACHE,), (HICACHE,)]
    assert sglang.arms[2].engine_args == (*sglang.arms[1].engine_args, "--hicache-storage-backend", "mooncake")


@pytest.mark.covers("TR-09")
def test_a_change_of_router_and_of_tiers_at_once_is_no_plan() -> None:
    left = Contender("a", {"gateway.policy": "sticky"})
    right = Contender("b", {"gateway.policy": "cache_load"}, {"tiers": [{"url": "memory://x"}]})
    words = ("--enable-hierarchical-cache", "--max-num-seqs", "8")
    both = Contender("c", {"gateway.policy": "sticky"}, engine_args=words)

    assert plan_problems((left, right)) == ("`a` and `b` differ in 2 factors: router, store",)
    assert plan_problems((left, both)) == ("`a` and `c` differ in 2 factors: engine, store",)
