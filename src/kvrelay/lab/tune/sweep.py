"""The sweep: every weight vector is an arm on the training half; the pick is confirmed on the other half.

The rule is an SLO or a gate file; either stands in both manifests before the first arm. With gates, the candidate's
name in the file stands for whatever vector is being judged, and is the pick's name on the held-out half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvrelay.core.gates.judge import Outcome
from kvrelay.core.traces.cut import CutRule, cut
from kvrelay.lab.arms.contender import Contender, Weights
from kvrelay.lab.arms.fleets import FreshMocks
from kvrelay.lab.arms.gate_store import GateStore, registration_of
from kvrelay.lab.arms.measure import Measured, Watcher, measure
from kvrelay.lab.arms.results import PolicyResult
from kvrelay.lab.arms.ruling import Run, rule_on
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.trace_file import TraceFile
from kvrelay.lab.tune.halves import halves

CONTROL = "round_robin"
TRAINING, HELD_OUT = "training", "held_out"

# From "cache only" to "load only", with the defaults in between.
DEFAULT_VECTORS = (
    Weights(alpha=1.0, beta=0.0, gamma=0.0, delta=0.0),
    Weights(alpha=1.0, beta=0.002, gamma=0.005, delta=0.05),
    Weights(alpha=1.0, beta=0.02, gamma=0.05, delta=0.05),
    Weights(alpha=1.0, beta=0.1, gamma=0.25, delta=0.05),
    Weights(alpha=0.0, beta=0.02, gamma=0.05, delta=0.05),
)


class Slo(Struct, frozen=True):
    """What has to hold, of modelled times on mock workers."""

    ttft_p95_ms: float
    max_failures: int = 0

    def rule(self) -> str:
        return (
            f"pass: at most {self.max_failures} failures and p95 time to first token at most {self.ttft_p95_ms:g} ms; "
            f"{PICK_RULE}"
        )

    def passed_by(self, result: PolicyResult) -> bool | None:
        """None: unknown, because nothing was answered."""
        if result.ttft_ms.p95 is None:
            return None
        return result.failures <= self.max_failures and result.ttft_ms.p95 <= self.ttft_p95_ms


PICK_RULE = (
    "pick: of those that pass, the most actual hit tokens, then the lowest p95, then the first in the list; "
    "confirmed when it passes on the held-out half, too"
)


class Sweep(Struct, frozen=True, eq=False):
    """`pick` is null when no vector passes, `confirmed` when the held-out half says nothing (or was not run)."""

    measured: Measured
    rule: str
    passed: dict[str, bool | None]
    pick: str | None
    candidate: str | None = None  # what the pick is called in the held-out run
    held_out: Run | None = None
    confirmed: bool | None = None


class Plan(Struct, frozen=True, eq=False):
    """What is swept over and judged by. With `gates`, `slo` is not looked at."""

    vectors: tuple[Weights, ...]
    slo: Slo
    gates: GateStore | None = None

    def rule(self) -> str:
        return self.slo.rule() if self.gates is None else f"pass: gates {self.gates.file.digest}; {PICK_RULE}"

    @property
    def control(self) -> str:
        return CONTROL if self.gates is None else self.gates.file.baseline

    def candidate(self, chosen: str) -> str:
        """What the picked vector is called on the held-out half, so that the gates mean it."""
        return chosen if self.gates is None else self.gates.file.candidate


async def run_sweep(source: TraceFile, settings: RunSettings, plan: Plan, *, out: Path, watcher: Watcher) -> Sweep:
    """Both halves leave a whole run in a folder of its own: `training` and `held_out`."""
    training, held_out = _halves(source, settings)
    settings = msgspec.structs.replace(settings, cut=CutRule())
    contenders = tuple(map(Contender.of_weights, plan.vectors))
    measured = await _measure(training, settings, plan, contenders, out / TRAINING, watcher)
    passed = _passed(measured, plan, out / TRAINING)
    chosen = pick({vector.name: measured.results[vector.name] for vector in plan.vectors}, passed)
    if chosen is None:
        return Sweep(measured, plan.rule(), passed, None)
    picked = next(contender for contender in contenders if contender.name == chosen)
    picked = msgspec.structs.replace(picked, name=plan.candidate(chosen))
    confirming = await _measure(held_out, settings, plan, (picked,), out / HELD_OUT, watcher)
    run = Run(confirming, rule_on(confirming, out / HELD_OUT, registration_of(confirming.manifest, plan.gates)))
    return Sweep(measured, plan.rule(), passed, chosen, picked.name, run, _confirmed(run, plan, chosen))


def pick(results: Mapping[str, PolicyResult], passed: Mapping[str, bool | None]) -> str | None:
    """By `PICK_RULE`; `results` are in the order of the list."""
    passing = [(name, result) for name, result in results.items() if passed[name]]
    best = min(passing, key=lambda item: _rank(item[1]), default=None)
    return None if best is None else best[0]


def _halves(source: TraceFile, settings: RunSettings) -> tuple[TraceFile, TraceFile]:
    """Of what the limits leave, so that both halves are sent whole."""
    kept = cut(source.trace, settings.cut).trace
    training, held_out = halves(kept, seed=settings.seed)
    named = ((training, "training half"), (held_out, "held-out half"))
    one, other = (msgspec.structs.replace(source, trace=half, name=f"{source.name}, {what}") for half, what in named)
    return one, other


async def _measure(
    source: TraceFile, settings: RunSettings, plan: Plan, tried: Sequence[Contender], out: Path, watcher: Watcher
) -> Measured:
    """The control is the first contender."""
    out.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    settings = msgspec.structs.replace(settings, contenders=(Contender.of_policy(plan.control), *tried))
    fleet = FreshMocks(settings.fleet, ready_timeout_s=settings.ready_timeout_s)
    return await measure(source, settings, fleet, rule=plan.rule(), out=out, watcher=watcher, gates=plan.gates)


def _passed(measured: Measured, plan: Plan, folder: Path) -> dict[str, bool | None]:
    names = [vector.name for vector in plan.vectors]
    if plan.gates is None:
        return {name: plan.slo.passed_by(measured.results[name]) for name in names}
    registration = registration_of(measured.manifest, plan.gates)
    found = {}
    for name in names:
        judged = msgspec.structs.replace(plan.gates.file, candidate=name)
        verdict = rule_on(msgspec.structs.replace(measured, gates=judged), folder, registration).verdict
        assert verdict is not None
        outcomes = {gate.outcome for gate in verdict.gates}
        found[name] = False if Outcome.FAIL in outcomes else None if Outcome.UNKNOWN in outcomes else True
    return found


def _confirmed(run: Run, plan: Plan, chosen: str) -> bool | None:
    verdict = run.ruling.verdict
    if verdict is None:
        return plan.slo.passed_by(run.measured.results[plan.candidate(chosen)])
    return {Outcome.PASS: True, Outcome.FAIL: False, Outcome.UNKNOWN: None}[verdict.verdict]


def _rank(result: PolicyResult) -> tuple[int, float]:
    assert result.ttft_ms.p95 is not None
    return (-(result.actual_cached_tokens or 0), result.ttft_ms.p95)
