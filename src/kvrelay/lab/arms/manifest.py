"""What was run. `stated` is fixed and digested before the first arm; `observed` is added while the arms run."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from kvrelay import __version__
from kvrelay.core.gates.evidence import LABELS
from kvrelay.core.gates.lock import GateLock
from kvrelay.core.traces.cut import Cut
from kvrelay.core.traces.plan import Plan
from kvrelay.lab.arms.counters import Counted
from kvrelay.lab.arms.fleets import ArmWorker, hardware_of_fleet, layer_of_fleet
from kvrelay.lab.arms.isolation import Isolation
from kvrelay.lab.arms.model_facts import ModelFacts
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.trace_file import TraceFile

PACKAGES = ("aiohttp", "httptools", "msgspec", "numpy", "pyzmq", "uvloop")
INDEX_VERSION = "64-bit keyed block keys, residency by bit masks"
EVENTS_VERSION = "vLLM KV events (msgpack over ZMQ, sequence numbers per rank)"


class TraceFacts(Struct, frozen=True):
    name: str
    sha256: str
    format: str
    block_size_tokens: int
    hash_scope: str
    requests_received: int
    requests_retained: int
    excluded: dict[str, int]
    limitations: tuple[str, ...]
    label: str = ""  # what results on it must be called


class PlanFacts(Struct, frozen=True):
    """Every arm sends this. `sha256`: over names, times and tokens; `turns_sha256`: over the turns in the folder."""

    sha256: str
    turns_sha256: str
    primer_sha256: str
    seed: int
    sessions: int
    requests: int
    prompt_tokens: int


class HostFacts(Struct, frozen=True):
    python: str
    system: str
    machine: str
    cores: int


class GateFacts(Struct, frozen=True):
    """The gate file as it was before the run; the file and its lock are kept in the folder."""

    title: str
    sha256: str
    baseline_run: str
    candidate: str
    baseline: str
    lock: GateLock | None


class FleetFacts(Struct, frozen=True):
    """What the results may be called follows from this and from nothing else."""

    label: str
    layer: str
    hardware: str
    workers: int
    engines: tuple[str, ...]  # kind and version, sorted, each once
    block_sizes_tokens: dict[str, int | None]
    kv_tiers: tuple[str, ...]
    topology: dict[str, str]  # worker -> host as seen from the gateway
    model: ModelFacts


class Stated(Struct, frozen=True):
    """Before the run."""

    kvrelay: str
    commit: str | None
    packages: dict[str, str]
    label: str
    rule: str
    gates: GateFacts | None
    trace: TraceFacts
    plan: PlanFacts
    fleet: FleetFacts
    index_version: str
    events_version: str
    settings: RunSettings
    order: tuple[str, ...]
    host: HostFacts


class ProcessFacts(Struct, frozen=True, kw_only=True):
    """A process of an arm and where it listened. None: it could not be found out."""

    name: str
    role: str  # router | worker
    pid: int | None
    urls: tuple[str, ...]
    log: str | None
    version: str | None
    incarnation: str | None = None
    hardware: str | None = None
    gpu_uuids: tuple[str, ...] | None = None
    block_size_tokens: int | None = None  # as the engine says
    router_block_size_tokens: int | None = None  # as the router uses it
    hash_seed: str | None = None  # PYTHONHASHSEED, or what stands for it
    tiering: str | None = None  # implementation of KV tiers that a worker runs with, `none` if with none


class ArmFacts(Struct, frozen=True):
    """One arm as it ran. `leftovers` is what was still there after it was stopped."""

    arm: str
    policy: str
    repeat: int
    started_s: float  # seconds since 1970, of the first request
    processes: tuple[ProcessFacts, ...]
    config_sha256: str
    index_blocks_at_start: int
    isolation: Isolation
    counters: dict[str, Counted]
    schedule_sha256: str
    wall_s: float
    replay_s: float
    receipts: int
    samples: int
    leftovers: tuple[str, ...]
    primer_sha256: str = ""


class Manifest(Struct, frozen=True):
    digest: str
    stated: Stated
    observed: tuple[ArmFacts, ...] = ()


def new_manifest(
    source: TraceFile,
    cut: Cut,
    plan: Plan,
    plan_facts: PlanFacts,
    settings: RunSettings,
    order: Sequence[Arm],
    fleet: FleetFacts,
    *,
    rule: str,
    gates: GateFacts | None,
) -> Manifest:
    stated = Stated(
        kvrelay=__version__,
        commit=_commit(),
        packages={name: _version(name) for name in PACKAGES},
        label=fleet.label,
        rule=rule,
        gates=gates,
        trace=_trace_facts(source, cut),
        plan=plan_facts,
        fleet=fleet,
        index_version=INDEX_VERSION,
        events_version=EVENTS_VERSION,
        settings=settings,
        order=tuple(arm.name for arm in order),
        host=HostFacts(platform.python_version(), platform.system(), platform.machine(), os.cpu_count() or 0),
    )
    return Manifest(hashlib.sha256(msgspec.json.encode(stated)).hexdigest(), stated)


def fleet_facts(workers: Sequence[ArmWorker], model: ModelFacts) -> FleetFacts:
    layer, hardware = layer_of_fleet(workers), hardware_of_fleet(workers)
    return FleetFacts(
        label=LABELS[layer],
        layer=layer.value,
        hardware=hardware.value,
        workers=len(workers),
        engines=tuple(sorted({f"{worker.engine} {worker.version or 'unknown'}" for worker in workers})),
        block_sizes_tokens={worker.name: worker.block_size_tokens for worker in workers},
        kv_tiers=("engine",),
        topology={worker.name: urlsplit(worker.url).hostname or "unknown" for worker in workers},
        model=model,
    )


def _trace_facts(source: TraceFile, cut: Cut) -> TraceFacts:
    counts = msgspec.to_builtins(cut.counts)
    reasons = {name: number for name, number in counts.items() if name not in ("received", "retained") and number}
    return TraceFacts(
        name=source.name,
        sha256=source.sha256,
        format=source.format,
        block_size_tokens=source.trace.block_size_tokens,
        hash_scope=source.trace.hash_scope,
        requests_received=cut.counts.received,
        requests_retained=cut.counts.retained,
        excluded=reasons,
        limitations=source.trace.limitations(),
        label=cut.trace.label,
    )


def _commit() -> str | None:
    """Of the checkout that the package lies in, `+changes` when files differ from it; an installed release has its
    version instead."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return f"release {__version__}"
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*words: str) -> str | None:
    try:
        asked = ["git", "-C", str(Path(__file__).parent), *words]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
