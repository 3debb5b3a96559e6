"""The plan of a tier experiment: which arms, in which blocks, and how workers are started for each.

Arms add one tier each to the one before and differ in nothing else; the router's policy is the same in all. Every arm
goes through a cold, a warm and a restart block, because a tier that helps a warm cache may do nothing for an empty one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from kvrelay.edge.connectors.sglang.hicache import HiCache, flags
from kvrelay.lab.arms.contender import Contender, plan_problems

BLOCKS = ("cold", "warm", "restart")
BLOCK_PRESET = "preset:cold_warm_restart"
ENGINES = ("mock", "vllm", "sglang")
GPU, CPU, REMOTE = "gpu", "gpu+cpu", "gpu+cpu+remote"
STEPS: dict[str, tuple[str, ...]] = {"cpu": (GPU, CPU), "remote": (CPU, REMOTE), "tiers": (GPU, CPU, REMOTE)}
"""What is planned -> its arms, in order."""

MEMORY_URL = "memory://kvrelay-plan"


class Wanted(Struct, frozen=True, kw_only=True):
    """`remote`: a store URL; for SGLang the name of a storage backend."""

    step: str
    policy: str
    engine: str
    cpu_bytes: int
    remote: str
    remote_bytes: int | None = None
    hicache: HiCache = HiCache()


class Cell(Struct, frozen=True):
    """One measurement."""

    arm: str
    block: str


class TierPlan(Struct, frozen=True):
    """`commands` carry it out, in order; `stores` are files with a `[store]` for workers that somebody else starts."""

    step: str
    policy: str
    engine: str
    arms: tuple[Contender, ...]
    cells: tuple[Cell, ...]
    commands: tuple[str, ...]
    stores: dict[str, dict[str, Any]]


def tier_plan(wanted: Wanted, *, out: Path) -> TierPlan:
    """`out`: where the plan's files will lie."""
    arms = tuple(_arm(wanted, name, out) for name in STEPS[wanted.step])
    problems = plan_problems(arms)
    assert not problems, problems
    stores = {} if wanted.engine != "vllm" else {
        f"store-{name}.toml": _store(wanted, name) for name in STEPS[wanted.step] if name != GPU
    }  # fmt: skip
    return TierPlan(
        step=wanted.step,
        policy=wanted.policy,
        engine=wanted.engine,
        arms=arms,
        cells=tuple(Cell(arm.name, block) for arm, block in product(arms, BLOCKS)),
        commands=_commands(wanted, arms, out),
        stores=stores,
    )


def write_plan(plan: TierPlan, out: Path) -> tuple[Path, ...]:
    """arms.toml, plan.json, and files with `[store]`. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    files = {"arms.toml": arms_toml(plan.arms)}
    files |= {name: store_toml(store) for name, store in plan.stores.items()}
    files["plan.json"] = msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n"
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    return tuple(out / name for name in files)


def arms_toml(arms: Sequence[Contender]) -> str:
    blocks = []
    for arm in arms:
        lines = ["[[contender]]", f"name = {json.dumps(arm.name)}", f"set = {_inline(arm.sets)}"]
        if arm.store is not None:
            lines.append(f"store = {_inline(arm.store)}")
        if arm.engine_args:
            lines.append(f"engine_args = {json.dumps(list(arm.engine_args))}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def store_toml(store: dict[str, Any]) -> str:
    lines = ["[store]", *(f"{name} = {json.dumps(value)}" for name, value in store.items() if name != "tiers")]
    for tier in store["tiers"]:
        lines += ["", "[[store.tiers]]", *(f"{name} = {json.dumps(value)}" for name, value in tier.items())]
    return "\n".join(lines) + "\n"


def _arm(wanted: Wanted, name: str, out: Path) -> Contender:
    sets = {"gateway.policy": wanted.policy}
    match wanted.engine:
        case "mock":
            return Contender(name, sets, None if name == GPU else _store(wanted, name))
        case "vllm":
            return Contender(name, sets, None, () if name == GPU else _vllm_args(out / f"store-{name}.toml"))
        case _:
            return Contender(name, sets, None, _sglang_args(wanted, name))


def _store(wanted: Wanted, name: str) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = [{"name": "cpu", "url": MEMORY_URL, "bytes": wanted.cpu_bytes}]
    if name == REMOTE:
        bound = {} if wanted.remote_bytes is None else {"bytes": wanted.remote_bytes}
        tiers.append({"name": "remote", "url": wanted.remote, **bound})
    return {"failure_policy": "recompute", "tiers": tiers}


def _vllm_args(store: Path) -> tuple[str, ...]:
    config = {
        "kv_connector": "KvrelayConnector",
        "kv_connector_module_path": "kvrelay.edge.connectors.vllm.kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": str(store.resolve())},
    }
    return ("--kv-transfer-config", json.dumps(config))


def _sglang_args(wanted: Wanted, name: str) -> tuple[str, ...]:
    """The page size is the same in all arms: it is no part of what is compared."""
    if name == GPU:
        return ("--page-size", str(wanted.hicache.page_size))
    return flags(structs.replace(wanted.hicache, storage=wanted.remote if name == REMOTE else None))


def _commands(wanted: Wanted, arms: Sequence[Contender], out: Path) -> tuple[str, ...]:
    here = shlex.quote(str(out))
    if wanted.engine == "mock":
        return (
            f"kvrelay replay {BLOCK_PRESET} --arms {here}/arms.toml --out {here}/blocks",
            f"kvrelay replay bundled --arms {here}/arms.toml --out {here}/paired",
            f"kvrelay verdict {here}/paired",
        )
    start = "vllm serve MODEL" if wanted.engine == "vllm" else "python -m sglang.launch_server --model-path MODEL"
    found = []
    for arm in arms:
        words = shlex.join(arm.engine_args)
        found.append(f"{start} {words}".rstrip() + f"    # every worker of arm {arm.name}, listed in fleet.toml")
        found.append(
            f"kvrelay replay TRACE --fleet fleet.toml --policy {wanted.policy} --reset cache_salt "
            f"--out {here}/{arm.name}    # cold; again for warm (--reset none), and after a restart of the workers"
        )
    verdicts = (f"kvrelay verdict {here}/{two.name} --baseline-run {here}/{one.name}" for one, two in pairwise(arms))
    return (*found, *verdicts)


def _inline(table: Any) -> str:
    """A TOML inline table, or a list of them."""
    if isinstance(table, dict):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_inline(value)}" for name, value in table.items()) + " }"
    if isinstance(table, list | tuple):
        return "[ " + ", ".join(_inline(value) for value in table) + " ]"
    return json.dumps(table)
