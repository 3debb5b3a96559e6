"""Finds runs, replays in blocks and drills below some folders, and reads of each what a checklist asks about.

Runs are counted anew from their raw records; nothing that a summary or a page claims is believed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.core.checklist.dossier import (
    SPLIT,
    ArmEvidence,
    BlockEvidence,
    BlocksEvidence,
    DrillEvidence,
    RunEvidence,
    TierCall,
    WaveEvidence,
)
from kvrelay.core.gates.gate_file import GateFile, Limit
from kvrelay.lab.arms.arm_store import media
from kvrelay.lab.arms.contender import plain_key, read_flat
from kvrelay.lab.arms.isolation import IsolationState
from kvrelay.lab.arms.manifest import ArmFacts
from kvrelay.lab.arms.manifest_check import gaps
from kvrelay.lab.arms.measure import MANIFEST
from kvrelay.lab.arms.planned import FILE as PLANNED
from kvrelay.lab.arms.results import ArmData, PolicyResult
from kvrelay.lab.arms.ruling import Run
from kvrelay.lab.arms.run import read_back
from kvrelay.lab.arms.run_folder import NoRun
from kvrelay.lab.arms.sameness import CONFIG
from kvrelay.lab.arms.tier_verdict import NotComparable, Side, tier_verdict
from kvrelay.lab.report.load_facts import cold_starts

DEPTH = 4  # folders below the named ones
MOST_FILES = 20_000
BLOCKS = "blocks.json"
_SKIPPED = frozenset(("arms", "node_modules", "__pycache__"))
_DRILL_BYTES = 64 << 20


class Found(Struct, frozen=True):
    """`unread`: files that look like evidence and are not, with the reason."""

    runs: tuple[RunEvidence, ...]
    blocks: tuple[BlocksEvidence, ...]
    drills: tuple[DrillEvidence, ...]
    unread: tuple[str, ...]


def find(places: Sequence[Path]) -> Found:
    """Places are folders, or files with the lines of `kvrelay drill run --json`. Oldest first, by modification."""
    runs: list[RunEvidence] = []
    blocks: list[BlocksEvidence] = []
    drills: list[DrillEvidence] = []
    unread: list[str] = []
    for file in sorted(_files(places), key=_age):
        try:
            if file.name == MANIFEST:
                if (file.parent / PLANNED).is_file():
                    runs.append(run_evidence(read_back(file.parent), file.parent))
            elif file.name == BLOCKS:
                blocks.append(_blocks(file))
            else:
                drills += _drills(file)
        except (NoRun, OSError, ValueError, KeyError, TypeError) as problem:
            unread.append(f"{file}: {problem}")
    return Found(tuple(runs), tuple(blocks), tuple(drills), tuple(unread))


def run_evidence(run: Run, folder: Path) -> RunEvidence:
    measured, ruling = run.measured, run.ruling
    stated = measured.manifest.stated
    raw = json.loads((folder / MANIFEST).read_bytes())
    problems = [*ruling.sameness.problems, *ruling.evidence.unanswered_records]
    problems += [f"{arm} did not start with empty caches" for arm in ruling.evidence.contaminated_arms]
    problems += [f"the manifest lacks {gap.where}: {gap.problem}" for gap in gaps(raw)]
    return RunEvidence(
        source=str(folder),
        digest=measured.manifest.digest,
        trace_sha256=stated.trace.sha256,
        label=stated.label,
        hardware=ruling.evidence.hardware.value,
        baseline=ruling.baseline,
        repeats=min((len(result.repeats) for result in measured.results.values()), default=0),
        arms=tuple(
            _arm(run, folder, name, result, measured.arms_of(name)) for name, result in measured.results.items()
        ),
        problems=tuple(problems),
        cold_start=_began_cold(measured.manifest.observed),
        waves=_waves(run),
        verdict=ruling.verdict,
        ttft_p95_limit_ms=None if measured.gates is None else _ttft_limit(measured.gates),
        tier_calls=_tier_calls(run, folder),
    )


def _arm(run: Run, folder: Path, name: str, result: PolicyResult, data: Sequence[ArmData]) -> ArmEvidence:
    receipts = [receipt for one in data for receipt in one.receipts.values()]
    moved = [receipt.remote_bytes_read for receipt in receipts]
    started = _started_with(folder, run.measured.facts_of(name))
    comparison = run.ruling.comparisons.get(name)
    ratio = None if comparison is None else comparison.compared.metrics["ttft_ms"].overall
    return ArmEvidence(
        name=name,
        policy=str(started.get("gateway.policy", name)),
        added=_added(started),
        requests=result.requests,
        failures=result.failures,
        tasks_planned=result.tasks.planned,
        tasks_successful=result.tasks.successful,
        ttft_p50_ms=result.ttft_ms.p50,
        ttft_p95_ms=result.ttft_ms.p95,
        ttft_count=result.ttft_ms.count,
        eligible_tokens=result.eligible_tokens,
        cached_tokens=result.actual_cached_tokens,
        route_loss_tokens=result.gate_loss_tokens.route,
        queue_known=any(receipt.worker_queue_at_route is not None for receipt in receipts),
        transferred_bytes=None if all(size is None for size in moved) else sum(size or 0 for size in moved),
        ttft_ratio=ratio,
        kv_usage_peak_ratio=run.ruling.figures[name]["kv_usage_peak_ratio"].value,
    )


def _started_with(folder: Path, facts: Sequence[ArmFacts]) -> dict[str, Any]:
    """The first arm's configuration; empty where it is not there (the run's problems say so)."""
    for one in facts:
        try:
            return read_flat(folder / "arms" / one.arm / CONFIG)
        except (OSError, ValueError):
            continue
    return {}


def _added(started: dict[str, Any]) -> tuple[str, ...]:
    roles = {value for key, value in started.items() if plain_key(key) == "workers.role"}
    return (*media(started), *((SPLIT,) if roles & {"prefill", "decode"} else ()))


def _began_cold(observed: Sequence[ArmFacts]) -> bool | None:
    states = {facts.isolation.state for facts in observed}
    if IsolationState.CONTAMINATED in states:
        return False
    return None if IsolationState.UNVERIFIED in states or not states else True


def _waves(run: Run) -> tuple[WaveEvidence, ...]:
    return tuple(
        WaveEvidence(f"{wave.worker} ({arm})", wave.wave_requests, wave.wave_ttft_ms.p95, wave.ratio)
        for arm, waves in cold_starts(run.measured).items()
        for wave in waves
        if wave.wave_requests
    )


def _tier_calls(run: Run, folder: Path) -> tuple[TierCall, ...]:
    """Of every two arms that differ in one tier."""
    found = []
    for left, right in permutations(run.measured.results, 2):
        baseline, candidate = Side(run, folder, left), Side(run, folder, right)
        with contextlib.suppress(NotComparable, OSError, ValueError, IndexError):
            called = tier_verdict(baseline, candidate)
            found.append(TierCall(called.tier[0], right, left, called.decision.value, called.verdict.reasons))
    return tuple(found)


def _ttft_limit(gates: GateFile) -> float | None:
    """The absolute one on the candidate's p95, if there is any."""
    for gate in gates.gates:
        match gate.condition:
            case Limit(metric="ttft_p95_ms", at_most=True, ratio=False, arm=arm, value=value):
                if arm in (None, gates.candidate):
                    return value
    return None


class _Times(Struct):
    p50: float | None = None
    p95: float | None = None


class _Block(Struct):
    name: str
    before: str
    requests: int
    failures: int
    ttft_ms: _Times
    hit_share: float | None = None


class _Blocks(Struct):
    label: str
    sha256: str
    policies: dict[str, list[_Block]]


def _blocks(file: Path) -> BlocksEvidence:
    found = msgspec.json.decode(file.read_bytes(), type=_Blocks)
    blocks = [
        BlockEvidence(
            policy, one.name, one.before, one.requests, one.failures, one.ttft_ms.p50, one.ttft_ms.p95, one.hit_share
        )
        for policy, own in found.policies.items()
        for one in own
    ]
    return BlocksEvidence(str(file), found.sha256, found.label, tuple(blocks))


class _Promise(Struct):
    promise: str
    verdict: str
    observed: str = ""


class _DrillLine(Struct):
    drill: str
    fleet: str
    verdict: str
    promises: list[_Promise]


def _drills(file: Path) -> list[DrillEvidence]:
    """A result with its history, or lines of results; a JSON file of any other kind is no evidence and no problem."""
    found = []
    for line in file.read_bytes().splitlines():
        if not line.startswith(b'{"drill":'):
            break
        result = msgspec.json.decode(line, type=_DrillLine)
        broken = [f"{one.promise}: {one.observed}" for one in result.promises if one.verdict == "fail"]
        found.append(DrillEvidence(str(file), result.drill, result.fleet, result.verdict, tuple(broken)))
    return found


def _files(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        if place.is_file():
            yield place
        else:
            yield from islice(_below(place), MOST_FILES)


def _below(folder: Path) -> Iterator[Path]:
    for at, names, files in os.walk(folder):
        depth = len(Path(at).relative_to(folder).parts)
        names[:] = sorted(n for n in names if n not in _SKIPPED and not n.startswith(".")) if depth < DEPTH else []
        for name in sorted(files):
            file = Path(at, name)
            if name in (MANIFEST, BLOCKS) or (name.endswith((".json", ".jsonl")) and _begins_as_drill(file)):
                yield file


def _begins_as_drill(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(9) == b'{"drill":' and file.stat().st_size <= _DRILL_BYTES
    except OSError:
        return False


def _age(file: Path) -> tuple[float, str]:
    try:
        return file.stat().st_mtime, str(file)
    except OSError:
        return 0.0, str(file)
