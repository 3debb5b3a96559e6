"""The verdict as people read it: the word, the reasons, the three final judges, every gate."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kvrelay.core.gates.evidence import Layer
from kvrelay.core.gates.gate_file import THIS_RUN
from kvrelay.core.gates.judge import FinalJudge, GateOutcome, Value, Verdict
from kvrelay.core.gates.metrics import METRICS
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.ruling import Ruling
from kvrelay.lab.report.table import Origin, Table, interval, number

JUDGE_WORDS = {
    "ttft_p95_ms": "p95 time to first token, ms",
    "session_wall_p50_ms": "median session wall time, ms",
    "successful_tasks_per_s": "successful tasks per second",
}
TOGETHER = (
    ("hit rate", "hit_ratio"),
    ("p95 TTFT ms", "ttft_p95_ms"),
    ("wrong context requests", "wrong_context_requests"),
)


class VerdictView(Struct, frozen=True):
    """`word` is pass, fail, unknown, or `ranking` where no gates were given."""

    word: str
    heading: str
    sentence: str
    reasons: tuple[str, ...]
    chips: tuple[str, ...]  # how far it reaches, in a few words each
    facts: tuple[tuple[str, str], ...]
    judges: Table | None
    gates: Table | None


def verdict_view(measured: Measured, ruling: Ruling) -> VerdictView:
    """On mock workers there is no verdict on latency: what is judged is called modelled."""
    modelled = measured.manifest.stated.fleet.layer == Layer.MOCK.value
    heading = "Verdict on modelled times" if modelled else "Verdict"
    verdict = ruling.verdict
    if verdict is None:
        ranking = ruling.ranking
        chips = (f"evidence {ranking.evidence}", "no gates, so no verdict")
        facts = (("rule, stated before the run", ranking.rule),)
        return VerdictView("ranking", "Who is ahead", ranking.won, (ranking.why,), chips, facts, None, None)
    sentence = f"{verdict.candidate} against {verdict.baseline}"
    return VerdictView(
        word=verdict.verdict.value,
        heading=heading,
        sentence=sentence,
        reasons=verdict.reasons,
        chips=_chips(verdict),
        facts=_facts(verdict, measured),
        judges=_judges(verdict, modelled=modelled),
        gates=gates_table(verdict.gates),
    )


def gates_table(gates: tuple[GateOutcome, ...]) -> Table:
    rows: list[tuple[str, ...]] = []
    for gate in gates:
        rows.append((gate.name, gate.outcome.value, "all of these:" if gate.parts else gate.reason))
        rows += [(f"and: {part.name}", part.outcome.value, part.reason) for part in gate.parts]
    return Table(("gate", "outcome", "measured, and what was asked"), tuple(rows))


def together_table(measured: Measured, ruling: Ruling) -> Table:
    """Hit rate, waiting, transfer cost, wrong contexts and isolation only mean something beside each other."""
    rows = []
    for policy, figures in ruling.figures.items():
        cells = [_value(figures, metric) for _, metric in TOGETHER]
        rows.append((policy, *cells[:2], _transfer(measured, policy), cells[2], _isolation(measured, policy)))
    header = (
        "policy",
        "hit rate",
        "p95 TTFT ms, failed ones last",
        "transfer cost",
        "wrong context",
        "isolation of arms",
    )
    return Table(header, tuple(rows), origins=(*[Origin.DERIVED] * 2, Origin.MEASURED, *[Origin.DERIVED] * 2))


def _chips(verdict: Verdict) -> tuple[str, ...]:
    registered = "pre-registered" if verdict.registration == "registered" else "not pre-registered"
    promotion = f"{verdict.promotion.replace('_', ' ')}: {verdict.promotion_reason}"
    return (registered, f"evidence {verdict.evidence}", promotion)


def _facts(verdict: Verdict, measured: Measured) -> tuple[tuple[str, str], ...]:
    gates = measured.manifest.stated.gates
    lock = None if gates is None else gates.lock
    source = "the baseline arm of this run" if verdict.baseline_run == THIS_RUN else verdict.baseline_run
    return (
        ("gates", verdict.registration + ("" if lock is None else f", locked at {lock.locked_at}")),
        ("gate file", "unknown" if gates is None else f"{gates.title}; sha256 {gates.sha256}"),
        ("thresholds from", source),
    )


def _judges(verdict: Verdict, *, modelled: bool) -> Table:
    rows = tuple(_judge(judge, modelled=modelled) for judge in verdict.final_judges)
    header = ("final judge", verdict.baseline, verdict.candidate, "candidate / baseline", "paired (95 % interval)")
    time = Origin.MODELLED if modelled else Origin.MEASURED
    return Table(header, rows, origins=(time, time, Origin.DERIVED, Origin.DERIVED))


def _judge(judge: FinalJudge, *, modelled: bool) -> tuple[str, ...]:
    name = f"modelled {JUDGE_WORDS[judge.metric]}" if modelled else JUDGE_WORDS[judge.metric]
    ratio = "unknown" if judge.ratio is None else f"{judge.ratio:.3f}"
    effect = "one value per arm" if judge.effect is None else interval(judge.effect)
    never = "never answered" if judge.never_answered else "unknown"
    sides = (never if value is None else number(value) for value in (judge.baseline, judge.candidate))
    return (name, *sides, ratio, effect)


def _value(figures: Mapping[str, Value], metric: str) -> str:
    value = figures[metric]
    if value.value is None:
        return value.reason or "unknown"
    if value.value == float("inf"):
        return "never answered"
    shown = f"{100 * value.value:.1f} %" if metric.endswith("_ratio") else number(value.value)
    return f"{shown} of {value.count}" if METRICS[metric].kind.value == "reuse" else shown


def _transfer(measured: Measured, policy: str) -> str:
    receipts = [receipt for data in measured.arms_of(policy) for receipt in data.receipts.values()]
    moved = [receipt.remote_bytes_read for receipt in receipts if receipt.remote_bytes_read is not None]
    if not moved:
        return "none: no tier beyond the engines' own"
    spent = sum(sum(receipt.remote_path_ms.values()) for receipt in receipts)
    return f"{sum(moved):,} bytes in {spent:,.0f} ms"


def _isolation(measured: Measured, policy: str) -> str:
    states = [facts.isolation.state.value for facts in measured.facts_of(policy)]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "unknown"
