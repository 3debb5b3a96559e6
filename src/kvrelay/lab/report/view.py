"""The figures of a run in the shape that the page shows: tables as text, charts as rows of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.core.receipts.receipt import GateLoss
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.results import ArmData, Figures, PolicyResult, hit_ratio
from kvrelay.lab.arms.ruling import Run
from kvrelay.lab.report.story import receipt_in_words
from kvrelay.lab.report.table import Table, milliseconds, percent, times, tokens

GATES = GateLoss.__struct_fields__
LOAD_POINTS = 120
EXCLUDED_WORDS = {
    "over_long": "over-long",
    "after_over_long": "after an over-long one",
    "beyond_turn_limit": "beyond the limit of turns per session",
    "session_too_short": "in sessions that are too short",
    "session_not_sampled": "in sessions that were not sampled",
    "beyond_request_limit": "beyond the limit of requests",
}
EXPLAINED_GATES = {
    "hit": "reused from the chosen worker's cache",
    "prefix": "nobody held them",
    "route": "another worker held them",
    "residency": "believed to be there, but gone",
    "transfer": "in another tier, not loaded",
}


class Chart(Struct, frozen=True):
    """`kind` names the drawing function; the same numbers stand below it as a table."""

    kind: str
    title: str
    reading: str  # how to read it, one sentence
    rows: tuple[dict[str, Any], ...]
    table: Table


class View(Struct, frozen=True):
    title: str
    label: str
    won: str
    why: str
    rule: str
    overview: Table
    charts: tuple[Chart, ...]
    receipt_words: str
    arms: Table
    facts: tuple[tuple[str, str], ...]
    limitations: tuple[str, ...]
    manifest_json: str
    policies: tuple[str, ...]
    workers: tuple[str, ...]


def view_of(run: Run) -> View:
    measured = run.measured
    policies = tuple(measured.manifest.stated.settings.policies)
    results = {policy: measured.results[policy] for policy in policies}
    return View(
        title=f"{len(policies)} routing policies, one trace: {measured.manifest.stated.trace.name}",
        label=measured.manifest.stated.label,
        won=run.ruling.ranking.won,
        why=run.ruling.ranking.why,
        rule=run.ruling.ranking.rule,
        overview=overview_table(results, winner=run.ruling.ranking.winner),
        charts=(
            _ttft_chart(measured.arms, results),
            _hits_chart(results),
            _gates_chart(results),
            _claims_chart(measured.arms, results),
            _load_chart(measured.arms, policies),
        ),
        receipt_words=receipt_in_words(measured),
        arms=_arms_table(measured),
        facts=_facts(measured),
        limitations=limitations(measured),
        manifest_json=msgspec.json.format(msgspec.json.encode(measured.manifest), indent=2).decode(),
        policies=policies,
        workers=measured.arms[0].workers,
    )


def overview_table(results: dict[str, PolicyResult], *, winner: str | None) -> Table:
    header = (
        "policy", "requests", "failed", "TTFT p50 ms", "TTFT p95 ms", "session wall p50 ms", "claimed tokens",
        "actual hit tokens", "claimed - actual", "hit rate", "recomputed tokens", "busiest / mean load",
    )  # fmt: skip
    rows = [
        (
            f"{policy} (winner)" if policy == winner else policy,
            str(result.requests),
            str(result.failures),
            milliseconds(result.ttft_ms.p50),
            milliseconds(result.ttft_ms.p95),
            milliseconds(result.session_wall_ms.p50),
            tokens(result.claimed_tokens),
            tokens(result.actual_cached_tokens),
            tokens(claimed_minus_actual(result), signed=True),
            percent(hit_ratio(result)),
            tokens(result.recomputed_tokens),
            times(result.max_over_mean_load),
        )
        for policy, result in results.items()
    ]
    return Table(header, tuple(rows), emphasis=tuple(policy == winner for policy in results))


def claimed_minus_actual(figures: Figures) -> int | None:
    """Above 0: the index promised more than the engines held. Never clamped."""
    if figures.actual_cached_tokens is None:
        return None
    return figures.claimed_tokens - figures.actual_cached_tokens


def limitations(measured: Measured) -> tuple[str, ...]:
    scale, trace = measured.manifest.stated.settings.scale, measured.manifest.stated.trace
    excluded = ", ".join(f"{count} {EXCLUDED_WORDS[reason]}" for reason, count in trace.excluded.items())
    return (
        "All workers are mocks: times follow from stated prefill and decode rates. They show what routing does to "
        "queues and caches; they say nothing about the performance of an engine or a GPU.",
        f"The workload is a filtered synthetic subset: {trace.requests_retained} of {trace.requests_received} requests"
        + (f" (left out: {excluded})." if excluded else "."),
        f"It is scaled: one block of {trace.block_size_tokens} tokens became {scale.block_tokens} tokens, times were "
        f"divided by {scale.time_divisor:g}, pauses and answers capped.",
        "Prompts are made from block ids, so answers of earlier turns are new tokens to the engines: blocks that "
        "decoding filled are never hit here, while with real text they would be.",
        *trace.limitations,
    )


def _ttft_chart(arms: Sequence[ArmData], results: dict[str, PolicyResult]) -> Chart:
    rows = [
        {"policy": sample.policy, "ttft_ms": sample.ttft_ms}
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
        "Modelled time to first token",
        "Share of requests whose first token was there within this time of being due; further left is sooner.",
        tuple(rows),
        Table(header, tuple(table)),
    )


def _hits_chart(results: dict[str, PolicyResult]) -> Chart:
    rows = [
        {"policy": policy, "repeat": str(number + 1), "hit_tokens": figures.actual_cached_tokens}
        for policy, result in results.items()
        for number, figures in enumerate(result.repeats)
    ]
    header = ("policy", "repeat", "actual hit tokens", "hit rate", "recomputed tokens", "busiest / mean load")
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
        "Prompt tokens that the engines took from their own cache; each dot is one repeat on a fresh fleet.",
        tuple(rows),
        Table(header, tuple(table)),
    )


def _gates_chart(results: dict[str, PolicyResult]) -> Chart:
    rows, table = [], []
    for policy, result in results.items():
        parts = {"hit": result.actual_cached_tokens, **msgspec.to_builtins(result.gate_loss_tokens)}
        rows += [
            {"policy": policy, "gate": gate, "tokens": count} for gate, count in parts.items() if count is not None
        ]
        table.append((policy, *(tokens(count) for count in parts.values()), tokens(result.eligible_tokens)))
    meaning = "; ".join(f"{gate}: {text}" for gate, text in EXPLAINED_GATES.items())
    return Chart(
        "gates",
        "Where the eligible tokens went",
        f"Every eligible token was hit or lost at exactly one gate. {meaning}.",
        tuple(rows),
        Table(("policy", "hit", *GATES, "eligible"), tuple(table)),
    )


def _claims_chart(arms: Sequence[ArmData], results: dict[str, PolicyResult]) -> Chart:
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
        Table(header, tuple(table)),
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
        Table(("policy (mean in flight)", *workers), tuple(table)),
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


def _arms_table(measured: Measured) -> Table:
    header = (
        "arm, in order",
        "samples",
        "receipts",
        "index at start",
        "wall s",
        "gateway pid",
        "worker pids",
        "left behind",
    )
    rows = [
        (
            facts.arm,
            str(facts.samples),
            str(facts.receipts),
            str(facts.index_blocks_at_start),
            f"{facts.wall_s:.1f}",
            str(facts.processes[0].pid),
            " ".join(str(process.pid) for process in facts.processes[1:]),
            ", ".join(facts.leftovers) or "nothing",
        )
        for facts in measured.manifest.observed
    ]
    return Table(header, tuple(rows))


def _facts(measured: Measured) -> tuple[tuple[str, str], ...]:
    stated = measured.manifest.stated
    fleet = stated.settings.fleet
    return (
        ("trace", f"{stated.trace.name} ({stated.trace.format}), sha256 {stated.trace.sha256}"),
        ("plan", f"{stated.plan.sessions} sessions, {stated.plan.requests} requests, sha256 {stated.plan.sha256}"),
        ("seed", str(stated.plan.seed)),
        (
            "each worker",
            f"{fleet.blocks} blocks of {fleet.block_size_tokens} tokens, prefill {fleet.prefill_tokens_per_s:,.0f} "
            f"tokens/s, decode {fleet.decode_ms:g} ms a step",
        ),
        ("kvrelay", f"{stated.kvrelay}, commit {stated.commit or 'unknown'}"),
        ("host", f"{stated.host.system} {stated.host.machine}, {stated.host.cores} cores, Python {stated.host.python}"),
        ("manifest digest", measured.manifest.digest),
    )
