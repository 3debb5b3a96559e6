"""Before the first arm: is the model a whole local snapshot, and do the workers neither phone home nor hash by chance?

Four things spoil a comparison without any error: weights that change under a name, a worker that fetches something in
the middle of an arm, block hashes that differ from one worker process to the next, and two implementations of KV tiers
at work at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from kvrelay.edge.connectors.tiering import OneTierOnly, one_only
from kvrelay.lab.arms import local_process
from kvrelay.lab.arms.fleets import ArmWorker
from kvrelay.lab.arms.model_facts import StatedModel

NEEDED = ("config.json", "tokenizer_config.json")
SHARD_INDEX = "model.safetensors.index.json"
HASHING_BY_SEED = ("vllm",)
"""Engines whose block names start from PYTHONHASHSEED, or from chance where it is not set."""


class Finding(Struct, frozen=True):
    """`outcome`: ok, fail or unknown."""

    what: str
    outcome: str
    reason: str


def preflight(model: StatedModel, workers: Sequence[ArmWorker]) -> tuple[Finding, ...]:
    """Of a fleet that runs already. What cannot be seen from this machine is unknown."""
    found = list(_model(model))
    for worker in workers:
        found += (_hash_seed(worker), _offline(worker), _connections(worker), _one_tier(worker))
    return tuple(found)


def _model(model: StatedModel) -> list[Finding]:
    if model.path is None:
        return [Finding("model snapshot", "unknown", "the fleet file has no `path` under [model]")]
    path = Path(model.path)
    if not path.is_absolute():
        return [Finding("model snapshot", "fail", f"`{path}` is relative: it names another folder from elsewhere")]
    if not path.is_dir():
        return [Finding("model snapshot", "fail", f"`{path}` is no folder on this machine")]
    missing = [name for name in (*NEEDED, *_shards(path)) if not (path / name).is_file()]
    if missing:
        return [Finding("model snapshot", "fail", f"`{path}` lacks {', '.join(missing)}")]
    return [Finding("model snapshot", "ok", f"`{path}` is whole")]


def _shards(path: Path) -> list[str]:
    """All files of the weights, as the index lists them; without an index there is one."""
    index = path / SHARD_INDEX
    if index.is_file():
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    return [] if any(path.glob("*.safetensors")) else ["model.safetensors"]


def _hash_seed(worker: ArmWorker) -> Finding:
    what = f"{worker.name}: PYTHONHASHSEED"
    if worker.engine not in HASHING_BY_SEED:
        return Finding(what, "ok", f"{worker.engine} does not hash by it")
    if worker.pid is None:
        return Finding(what, "unknown", "its process is not on this machine")
    if worker.hash_seed == "0":
        return Finding(what, "ok", "0")
    return Finding(what, "fail", f"`{worker.hash_seed}`" if worker.hash_seed else "not set: its block names are chance")


def _offline(worker: ArmWorker) -> Finding:
    what = f"{worker.name}: HF_HUB_OFFLINE"
    if worker.engine == "mock":
        return Finding(what, "ok", "a mock fetches nothing")
    if worker.pid is None:
        return Finding(what, "unknown", "its process is not on this machine")
    value = local_process.environment_of(worker.pid, "HF_HUB_OFFLINE")
    return Finding(what, "ok" if value == "1" else "fail", f"`{value}`" if value else "not set: it may ask for models")


def _one_tier(worker: ArmWorker) -> Finding:
    what = f"{worker.name}: one implementation of KV tiers"
    if worker.engine == "mock":
        return Finding(what, "ok", "a mock has those of its arm")
    words = None if worker.pid is None else local_process.command_line(worker.pid)
    if words is None:
        return Finding(what, "unknown", "its arguments cannot be seen from here")
    try:
        return Finding(what, "ok", one_only(words, where=worker.name) or "none is on")
    except OneTierOnly as problem:
        return Finding(what, "fail", str(problem))


def _connections(worker: ArmWorker) -> Finding:
    what = f"{worker.name}: connections beyond loopback"
    peers = None if worker.pid is None else local_process.remote_peers(worker.pid)
    if peers is None:
        return Finding(what, "unknown", "its process cannot be looked at from here")
    return Finding(what, "fail" if peers else "ok", f"to {', '.join(peers)}" if peers else "none at this moment")
