"""The verdict: pass, fail or unknown, with reasons. Everything it looks at is an argument, so it can be asked again.

A gate that fails makes the verdict fail. Whatever is unknown, or proves nothing, keeps it from passing. Two things can
be neither configured nor left out: the candidate may not fail more requests and may not finish fewer tasks than the
baseline, and a failed request counts as one that never got its first token, in every percentile that is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from kvrelay.core.gates.evidence import Evidence, Hardware, Layer
from kvrelay.core.gates.gate_file import AllOf, Condition, GateFile, Limit, PairedLimit
from kvrelay.core.gates.metrics import FINAL_JUDGES, METRICS
from kvrelay.core.stats.paired import Call, Comparison, PairedEffect


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"


EXIT_STATUS = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.UNKNOWN: 3}


class Value(Struct, frozen=True):
    """One figure of one arm; `count` is what stands behind it. Without a value there is a reason.

    Infinite: the percentile lies among requests that were never answered.
    """

    value: float | None
    count: int = 0
    reason: str | None = None


class GateOutcome(Struct, frozen=True):
    name: str
    outcome: Outcome
    reason: str
    parts: tuple[GateOutcome, ...] = ()


class FinalJudge(Struct, frozen=True):
    """One of the three that decide in the end. `ratio` is candidate / baseline."""

    metric: str
    baseline: float | None
    candidate: float | None
    ratio: float | None
    never_answered: bool  # one of the two lies among requests that never got an answer
    effect: PairedEffect | None


class Verdict(Struct, frozen=True):
    """`promotion`: promotable or not_promotable, which is about the evidence and not about the gates."""

    verdict: Outcome
    candidate: str
    baseline: str
    baseline_run: str
    registration: str
    evidence: str  # sufficient | insufficient
    label: str
    layer: str
    hardware: str
    promotion: str
    promotion_reason: str
    final_judges: tuple[FinalJudge, ...]
    gates: tuple[GateOutcome, ...]
    reasons: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]


Figures = Mapping[str, Mapping[str, Value]]
"""By arm, by metric. What is missing is unknown."""


class Compared(Struct, frozen=True, eq=False):
    """Candidate against baseline, pair by pair. `failures` is by bucket: baseline's and candidate's."""

    metrics: Mapping[str, Comparison] = {}
    failures: Mapping[str, tuple[int, int]] = {}


def judge(gates: GateFile, figures: Figures, compared: Compared, evidence: Evidence) -> Verdict:
    bench = _Bench(gates, figures, compared)
    outcomes = (*bench.built_in(), *(bench.gate(gate.name, gate.condition) for gate in gates.gates))
    doubts = evidence.doubts()
    outcome, reasons = _verdict(outcomes, doubts, evidence)
    promotion_reason = _not_promotable(outcome, evidence)
    return Verdict(
        verdict=outcome,
        candidate=gates.candidate,
        baseline=gates.baseline,
        baseline_run=gates.baseline_run,
        registration=evidence.registration.value,
        evidence="insufficient" if doubts else "sufficient",
        label=evidence.label,
        layer=evidence.layer.value,
        hardware=evidence.hardware.value,
        promotion="not_promotable" if promotion_reason else "promotable",
        promotion_reason=promotion_reason or "two or more workers on GPUs, every gate kept",
        final_judges=tuple(bench.final(metric) for metric in FINAL_JUDGES),
        gates=outcomes,
        reasons=reasons,
    )


def _verdict(
    outcomes: Sequence[GateOutcome], doubts: Sequence[str], evidence: Evidence
) -> tuple[Outcome, tuple[str, ...]]:
    failed = [outcome for outcome in outcomes if outcome.outcome is Outcome.FAIL]
    open_ones = [outcome for outcome in outcomes if outcome.outcome is Outcome.UNKNOWN]
    reasons = [f"{outcome.name}: {outcome.reason}" for outcome in (*failed, *open_ones)]
    if not evidence.registration.pre_registered:
        reasons.append(f"not pre-registered: the gates are {evidence.registration.value.replace('_', ' ')}")
    reasons += [f"insufficient evidence: {doubt}" for doubt in doubts]
    if failed:
        return Outcome.FAIL, tuple(reasons)
    if open_ones or doubts or not evidence.registration.pre_registered:
        return Outcome.UNKNOWN, tuple(reasons)
    return Outcome.PASS, ("every gate was kept",)


def _not_promotable(outcome: Outcome, evidence: Evidence) -> str | None:
    """None when the result may promote the candidate."""
    if evidence.layer is Layer.MOCK:
        return "mock workers: modelled times are no performance of any engine"
    if evidence.layer is Layer.ONE_WORKER:
        return "one worker: nothing was routed"
    if evidence.hardware is not Hardware.GPU:
        return f"hardware is {evidence.hardware.value}: results hold there and say nothing about GPUs"
    return None if outcome is Outcome.PASS else f"the verdict is {outcome.value}"


class _Bench:
    """What the rules are put to."""

    def __init__(self, gates: GateFile, figures: Figures, compared: Compared) -> None:
        self._gates = gates
        self._figures = figures
        self._compared = compared

    def built_in(self) -> tuple[GateOutcome, ...]:
        """Not in the file, because nobody may leave them out."""
        rules = (
            ("no more failures than the baseline", Limit("failed_ratio", 1.0, at_most=True, ratio=True)),
            ("no fewer tasks succeed than under the baseline", Limit("task_success_ratio", 1.0, False, ratio=True)),
        )
        return tuple(self.gate(name, rule) for name, rule in rules)

    def gate(self, name: str, condition: Condition) -> GateOutcome:
        match condition:
            case AllOf():
                parts = tuple(self.gate(_words(part), part) for part in condition.parts)
                return GateOutcome(name, _together(parts), _all_words(parts), parts)
            case PairedLimit(paired="failures"):
                return GateOutcome(name, *self._paired_failures(condition))
            case PairedLimit():
                return GateOutcome(name, *self._paired(condition))
            case Limit(ratio=True):
                return GateOutcome(name, *self._relative(condition))
            case Limit():
                return GateOutcome(name, *self._absolute(condition))

    def final(self, metric: str) -> FinalJudge:
        baseline, candidate = (self._value(arm, metric).value for arm in (self._gates.baseline, self._gates.candidate))
        return FinalJudge(
            metric=metric,
            baseline=_finite(baseline),
            candidate=_finite(candidate),
            ratio=None if baseline is None or candidate is None else _finite(_ratio(candidate, baseline)),
            never_answered=any(value is not None and math.isinf(value) for value in (baseline, candidate)),
            effect=self._effect(metric),
        )

    def _effect(self, metric: str) -> PairedEffect | None:
        paired = {"ttft_p95_ms": "ttft_ms", "session_wall_p50_ms": "session_wall_ms"}.get(metric)
        comparison = None if paired is None else self._compared.metrics.get(paired)
        if comparison is None:
            return None
        return comparison.p95_ratio if metric.endswith("p95_ms") else comparison.overall

    def _value(self, arm: str, metric: str) -> Value:
        if arm not in self._figures:
            return Value(None, reason=f"there is no arm `{arm}` in this run")
        return self._figures[arm].get(metric) or Value(None, reason=f"{metric} of {arm} was not recorded")

    def _absolute(self, limit: Limit) -> tuple[Outcome, str]:
        arm = limit.arm or self._gates.candidate
        value = self._value(arm, limit.metric)
        if value.value is None:
            return Outcome.UNKNOWN, value.reason or f"{limit.metric} of {arm} is unknown"
        said = f"{limit.metric} of {arm} is {_spelt(value.value)} ({value.count} values)"
        return _held(value.value, limit), f"{said}, {_bound(limit)} {limit.value:g}"

    def _relative(self, limit: Limit) -> tuple[Outcome, str]:
        arm, other = limit.arm or self._gates.candidate, limit.relative_to or self._gates.baseline
        value, base = self._value(arm, limit.metric), self._value(other, limit.metric)
        for one, name in ((value, arm), (base, other)):
            if one.value is None:
                return Outcome.UNKNOWN, one.reason or f"{limit.metric} of {name} is unknown"
        assert value.value is not None and base.value is not None
        ratio = _ratio(value.value, base.value)
        said = f"{limit.metric}: {arm} {_spelt(value.value)}, {other} {_spelt(base.value)}"
        if ratio is None:
            return Outcome.UNKNOWN, f"{said}, which have no ratio"
        return _held(ratio, limit), f"{said}, a ratio of {_spelt(ratio)}, {_bound(limit)} {limit.value:g}"

    def _paired(self, limit: PairedLimit) -> tuple[Outcome, str]:
        comparison = self._compared.metrics.get(limit.paired)
        if comparison is None:
            return Outcome.UNKNOWN, f"no pairs of {limit.paired} were compared"
        if limit.over == "all":
            return _surely(comparison.overall, limit.value, "all pairs")
        if not comparison.buckets:
            return Outcome.UNKNOWN, "no bucket has a pair"
        if limit.over == "no_bucket_worse":
            worse = [name for name, effect in comparison.buckets.items() if effect.call is Call.HIGHER]
            if worse:
                return Outcome.FAIL, f"slower than the baseline: {', '.join(worse)}"
            return Outcome.PASS, f"none of {len(comparison.buckets)} buckets is surely slower than the baseline"
        each = [_surely(effect, limit.value, name) for name, effect in comparison.buckets.items()]
        worst = _worst(outcome for outcome, _ in each)
        return worst, "; ".join(words for outcome, words in each if outcome is worst)

    def _paired_failures(self, limit: PairedLimit) -> tuple[Outcome, str]:
        worse = [
            f"{name}: {candidate} failed, {baseline} under the baseline"
            for name, (baseline, candidate) in self._compared.failures.items()
            if candidate > baseline * limit.value
        ]
        if worse:
            return Outcome.FAIL, "; ".join(worse)
        if not self._compared.failures:
            return Outcome.UNKNOWN, "no bucket has a request"
        return Outcome.PASS, f"in none of {len(self._compared.failures)} buckets more failures than the limit"


def _surely(effect: PairedEffect, limit: float, where: str) -> tuple[Outcome, str]:
    """The whole interval on one side of the limit, or nothing is said."""
    if effect.interval is None or effect.ratio is None:
        return Outcome.UNKNOWN, f"{where}: too few sessions or repeats ({effect.pairs} pairs of {effect.sessions})"
    said = (
        f"{where}: candidate / baseline {effect.ratio:.3f}, {100 * effect.interval.level:g} % interval "
        f"{effect.interval.low:.3f} to {effect.interval.high:.3f}, at most {limit:g}"
    )
    if effect.interval.high <= limit:
        return Outcome.PASS, said
    return (Outcome.FAIL if effect.interval.low > limit else Outcome.UNKNOWN), said


def _held(value: float, limit: Limit) -> Outcome:
    return Outcome.PASS if (value <= limit.value if limit.at_most else value >= limit.value) else Outcome.FAIL


def _ratio(value: float, base: float) -> float | None:
    """Equal is 1, also of two zeros; two arms that never answered cannot be compared."""
    if math.isinf(value) and math.isinf(base):
        return None
    if value == base:
        return 1.0
    return value / base if base else math.inf


def _together(parts: Iterable[GateOutcome]) -> Outcome:
    return _worst(part.outcome for part in parts)


def _worst(outcomes: Iterable[Outcome]) -> Outcome:
    found = set(outcomes)
    return next(one for one in (Outcome.FAIL, Outcome.UNKNOWN, Outcome.PASS) if one in found)


def _all_words(parts: Sequence[GateOutcome]) -> str:
    """Of those parts that decide it."""
    worst = _together(parts)
    return "; ".join(part.reason for part in parts if part.outcome is worst)


def _words(limit: Limit | PairedLimit) -> str:
    if isinstance(limit, PairedLimit):
        return f"paired {limit.paired}, {limit.over.replace('_', ' ')}"
    return f"{limit.metric} ({METRICS[limit.metric].kind.value})"


def _bound(limit: Limit) -> str:
    return "at most" if limit.at_most else "at least"


def _spelt(value: float) -> str:
    return "never answered" if math.isinf(value) else f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value
