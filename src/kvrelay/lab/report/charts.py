"""The charts of a run: rows for the drawing functions, and the same figures as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvrelay.core.gates.evidence import Layer
from kvrelay.core.receipts.receipt import GateLoss
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.pairs import Comparisons
from kvrelay.lab.arms.results import ArmData, Figures, PolicyResult, hit_ratio
from kvrelay.lab.arms.ruling import Ruling
from kvrelay.lab.replay.sending import session_walls
from kvrelay.lab.report.chart import Chart
from kvrelay.lab.report.table import Origin, Table, interval, milliseconds, percent, times, tokens

GATES = GateLoss.__struct_fields__
LOAD_POINTS = 120
EXPLAINED_GATES = {
    "hit": "reused from the chosen worker's cache",
    "prefix": "nobody held them",
    "route": "another worker held them",
    "residency": "believed to be there, but gone",
    "transfer": "in another tier, not loaded",
}


def charts_of(measured: Measured, ruling: Ruling) -> tuple[Chart, ...]:
    results = measured.results
    mock = measured.manifest.stated.fleet.layer == Layer.MOCK.value
    time = Origin.MODELLED if mock else Origin.MEASURED
    return (
        _ttft_chart(measured.arms, results, time),
        _wall_chart(measured.arms, results, time),
        _pairs_chart(ruling.baseline, ruling.comparisons),
        _gates_chart(results),
        _hits_chart(results),
        _claims_chart(measured.arms, results),
        _late_chart(measured.arms, results),
        _load_chart(measured.arms, tuple(results)),
    )


def claimed_minus_actual(figures: Figures) -> int | None:
    """Above 0: the index promised more than the engines held. Never clamped."""
    if figures.actual_cached_tokens is None:
        return None
    return figures.claimed_tokens - figures.actual_cached_tokens


def _ttft_chart(arms: Sequence[ArmData], results: Mapping[str, PolicyResult], time: Origin) -> Chart:
    rows = [
        {"policy": sample.policy, "value": sample.ttft_ms}
        for data in arms
        for sample in data.samples
        if sample.ttft_ms is not None
    ]
    header = ("policy", "count", "p50 ms", "p95 ms", "p99 ms", "max ms", "p95 ms from sending", "sent late, p99 ms")
    table = [
        (
            policy,
            str(result.ttft_ms.count),
            *(milliseconds(getattr(result.ttft_ms, name)) for name in ("p50", "p95", "p99", "max")),
            milliseconds(result.ttft_sent_ms.p95),
            milliseconds(result.send_lag_ms.p99),
        )
        for policy, result in results.items()
    ]
    return Chart(
        "ttft",
        "Modelled time to first token" if time is Origin.MODELLED else "Time to first token",
        "Share of requests whose first token was there within this time of being due; further left is sooner.",
        tuple(rows),
        Table(header, tuple(table), origins=(Origin.MEASURED, *[time] * 6)),
    )


def _wall_chart(arms: Sequence[ArmData], results: Mapping[str, PolicyResult], time: Origin) -> Chart:
    rows = [
        {"policy": data.arm.policy, "value": wall.from_due_ms}
        for data in arms
        for wall in session_walls(data.samples)
        if not wall.failures
    ]
    header = ("policy", "sessions", "all turns answered", "p50 ms", "p95 ms", "max ms", "successful tasks / s")
    table = [
        (
            policy,
            str(result.tasks.planned),
            str(result.tasks.successful),
            *(milliseconds(getattr(result.session_wall_ms, name)) for name in ("p50", "p95", "max")),
            "unknown" if result.tasks.successful_per_s is None else f"{result.tasks.successful_per_s:.3f}",
        )
        for policy, result in results.items()
    ]
    return Chart(
        "wall",
        "Session wall time",
        "Share of sessions that were through within this time of their first turn being due. Only sessions all of "
        "whose turns were answered are drawn.",
        tuple(rows),
        Table(header, tuple(table), origins=(Origin.MEASURED, Origin.MEASURED, time, time, time, Origin.DERIVED)),
    )


def _pairs_chart(baseline: str, comparisons: Mapping[str, Comparisons]) -> Chart:
    """The same turn under two policies, bucket by bucket, with the interval of the ratio."""
    rows: list[dict[str, Any]] = []
    table = []
    for policy, found in comparisons.items():
        comparison = found.compared.metrics["ttft_ms"]
        for name, effect in (("all pairs", comparison.overall), *comparison.buckets.items()):
            failures = found.compared.failures.get(name)
            if effect.ratio is not None:
                span = effect.interval
                rows.append({
                    "policy": policy, "bucket": name, "ratio": effect.ratio, "call": effect.call.value,
                    "low": None if span is None else span.low, "high": None if span is None else span.high,
                })  # fmt: skip
            failed = "" if failures is None else f"{failures[0]} / {failures[1]}"
            cells = (
                str(effect.pairs),
                str(effect.sessions),
                interval(effect),
                effect.call.value.replace("_", " "),
                failed,
            )
            table.append((f"{policy}: {name}", *cells))
    header = (f"TTFT against {baseline}", "pairs", "sessions", "ratio (95 % interval)", "call", "failed, baseline / it")
    return Chart(
        "pairs",
        f"Paired: the same turn against {baseline}",
        "Time to first token, candidate / baseline, of the same turn in the same repeat; left of 1 is sooner. The bar "
        "is the 95 % interval, by whole sessions and repeats: where it crosses 1, nothing is said.",
        tuple(rows),
        Table(header, tuple(table), origins=(Origin.MEASURED, Origin.MEASURED, *[Origin.DERIVED] * 2, Origin.MEASURED)),
        wide=True,
    )


def _late_chart(arms: Sequence[ArmData], results: Mapping[str, PolicyResult]) -> Chart:
    rows = [{"policy": data.arm.policy, "value": max(0.01, sample.skew_ms)} for data in arms for sample in data.samples]
    header = ("policy", "requests", "late p50 ms", "late p95 ms", "late p99 ms", "late max ms", "held by a cap")
    held = {
        policy: sum(sample.held_ms > 0 for data in arms if data.arm.policy == policy for sample in data.samples)
        for policy in results
    }
    table = [
        (
            policy,
            str(result.send_lag_ms.count),
            *(milliseconds(getattr(result.send_lag_ms, name)) for name in ("p50", "p95", "p99", "max")),
            str(held[policy]),
        )
        for policy, result in results.items()
    ]
    return Chart(
        "late",
        "Lateness of the load generator",
        "How long after being due our own client handed a request over, a cap's waiting aside. If p99 is above 50 ms, "
        "this machine was a part of what was measured.",
        tuple(rows),
        Table(header, tuple(table), origins=(Origin.MEASURED,) * 6),
        wide=True,
    )


def _hits_chart(results: Mapping[str, PolicyResult]) -> Chart:
    rows = [
        {"policy": policy, "repeat": str(number + 1), "hit_tokens": figures.actual_cached_tokens}
        for policy, result in results.items()
        for number, figures in enumerate(result.repeats)
    ]
    header = ("policy", "repeat", "actual hit tokens", "hit rate", "recomputed tokens", "busiest / mean load")
    origins = (Origin.STATED, Origin.MEASURED, *[Origin.DERIVED] * 3)
    table = [
        (
            policy,
            str(number + 1),
            tokens(figures.actual_cached_tokens),
            percent(hit_ratio(figures)),
            tokens(figures.recomputed_tokens),
            times(figures.max_over_mean_load),
        )
        for policy, result in results.items()
        for number, figures in enumerate(result.repeats)
    ]
    return Chart(
        "hits",
        "Actual hit tokens, every repeat",
        "Prompt tokens that the engines took from their own cache; each dot is one repeat.",
        tuple(rows),
        Table(header, tuple(table), origins=origins),
    )


def _gates_chart(results: Mapping[str, PolicyResult]) -> Chart:
    """A waterfall: all that could have been hit, minus what each gate lost, is what was hit."""
    rows: list[dict[str, Any]] = []
    table = []
    for policy, result in results.items():
        losses: dict[str, int] = msgspec.to_builtins(result.gate_loss_tokens)
        table.append(
            (policy, tokens(result.eligible_tokens), *map(tokens, losses.values()), tokens(result.actual_cached_tokens))
        )
        left = result.eligible_tokens
        rows.append({"policy": policy, "step": "eligible", "from": 0, "to": left, "of": left})
        for gate, lost in losses.items():
            rows.append({"policy": policy, "step": gate, "from": left - lost, "to": left, "of": result.eligible_tokens})
            left -= lost
        rows.append({"policy": policy, "step": "hit", "from": 0, "to": left, "of": result.eligible_tokens})
    meaning = "; ".join(f"{gate}: {text}" for gate, text in EXPLAINED_GATES.items())
    header = ("policy", "eligible", *(f"lost: {gate}" for gate in GATES), "hit")
    return Chart(
        "gates",
        "Four gates: where the eligible tokens went",
        f"Every eligible token was hit or lost at exactly one gate. {meaning}.",
        tuple(rows),
        Table(header, tuple(table), origins=(*[Origin.DERIVED] * 5, Origin.MEASURED)),
        wide=True,
    )


def _claims_chart(arms: Sequence[ArmData], results: Mapping[str, PolicyResult]) -> Chart:
    rows = [
        {"policy": data.arm.policy, "claimed": receipt.matched_tokens_at_route, "actual": receipt.actual_cached_tokens}
        for data in arms
        for sample in data.samples
        if (receipt := data.receipts.get(sample.request_id)) is not None
        and receipt.matched_tokens_at_route is not None
        and receipt.actual_cached_tokens is not None
    ]
    header = ("policy", "claimed tokens", "actual hit tokens", "claimed - actual", "requests without usage")
    table = [
        (
            policy,
            tokens(result.claimed_tokens),
            tokens(result.actual_cached_tokens),
            tokens(claimed_minus_actual(result), signed=True),
            str(result.requests_without_usage),
        )
        for policy, result in results.items()
    ]
    return Chart(
        "claims",
        "Claimed at routing against actual",
        "One dot per request. On the line the index was right; below it, blocks were gone when the engine looked.",
        tuple(rows),
        Table(header, tuple(table), origins=(*[Origin.MEASURED] * 2, Origin.DERIVED, Origin.MEASURED)),
    )


def _load_chart(arms: Sequence[ArmData], policies: Sequence[str]) -> Chart:
    rows: list[dict[str, Any]] = []
    table = []
    for policy in policies:
        data = next(data for data in arms if data.arm.policy == policy)
        series = _in_flight(data)
        rows += [{"policy": policy, **point} for point in series]
        means = {
            worker: sum(point["in_flight"] for point in series if point["worker"] == worker) / LOAD_POINTS
            for worker in data.workers
        }
        table.append((policy, *(f"{mean:.2f}" for mean in means.values())))
    workers = arms[0].workers if arms else ()
    return Chart(
        "load",
        "Requests in flight per worker, first repeat",
        "Lines that run together are an even load; one line far above the others is a worker that makes people wait.",
        tuple(rows),
        Table(("policy (mean in flight)", *workers), tuple(table), origins=(Origin.MEASURED,) * len(workers)),
        wide=True,
    )


def _in_flight(data: ArmData) -> list[dict[str, Any]]:
    """Sampled on a grid: exact steps would only add ink."""
    end_ms = max((sample.ended_ms for sample in data.samples), default=0.0)
    points = []
    for number in range(LOAD_POINTS):
        at_ms = end_ms * (number + 0.5) / LOAD_POINTS
        there = [sample.worker for sample in data.samples if sample.sent_ms <= at_ms < sample.ended_ms]
        points += [
            {"worker": worker, "at_s": round(at_ms / 1000, 3), "in_flight": there.count(worker)}
            for worker in data.workers
        ]
    return points
