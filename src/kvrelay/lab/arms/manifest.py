"""What was run. `stated` is fixed and digested before the first arm; `observed` is added while the arms run."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec import Struct

from kvrelay import __version__
from kvrelay.core.traces.cut import Cut
from kvrelay.core.traces.plan import Plan
from kvrelay.lab.arms.settings import LABEL, RunSettings
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.trace_file import TraceFile

PACKAGES = ("aiohttp", "httptools", "msgspec", "numpy", "pyzmq", "uvloop")


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


class PlanFacts(Struct, frozen=True):
    """Every arm sends this; one digest over all names, times and tokens."""

    sha256: str
    seed: int
    sessions: int
    requests: int
    prompt_tokens: int


class HostFacts(Struct, frozen=True):
    python: str
    system: str
    machine: str
    cores: int


class Stated(Struct, frozen=True):
    """Before the run."""

    kvrelay: str
    commit: str | None
    packages: dict[str, str]
    label: str
    rule: str
    trace: TraceFacts
    plan: PlanFacts
    settings: RunSettings
    order: tuple[str, ...]
    host: HostFacts


class ProcessFacts(Struct, frozen=True):
    """A process of an arm and where it listened."""

    name: str
    pid: int
    urls: tuple[str, ...]
    incarnation: str | None = None


class ArmFacts(Struct, frozen=True):
    """One arm as it ran. It starts with an empty index; `leftovers` is what was still there after it was stopped."""

    arm: str
    policy: str
    repeat: int
    processes: tuple[ProcessFacts, ...]
    index_blocks_at_start: int
    wall_s: float
    receipts: int
    samples: int
    leftovers: tuple[str, ...]


class Manifest(Struct, frozen=True):
    digest: str
    stated: Stated
    observed: tuple[ArmFacts, ...] = ()


def new_manifest(
    source: TraceFile, cut: Cut, plan: Plan, settings: RunSettings, order: Sequence[Arm], *, rule: str
) -> Manifest:
    stated = Stated(
        kvrelay=__version__,
        commit=_commit(),
        packages={name: _version(name) for name in PACKAGES},
        label=LABEL,
        rule=rule,
        trace=_trace_facts(source, cut),
        plan=PlanFacts(plan.digest(), plan.seed, len(plan.sessions), plan.requests, plan.prompt_tokens),
        settings=settings,
        order=tuple(arm.name for arm in order),
        host=HostFacts(platform.python_version(), platform.system(), platform.machine(), os.cpu_count() or 0),
    )
    return Manifest(hashlib.sha256(msgspec.json.encode(stated)).hexdigest(), stated)


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
    )


def _commit() -> str | None:
    """Of the checkout that the package lies in; None when it is installed or there is no git."""
    try:
        asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
