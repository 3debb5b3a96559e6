"""Answers of a simulation as tables and as a page, with what they do not show."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvrelay.core.cachesim.misses import Miss
from kvrelay.lab.report.line_chart import Line, LineChart
from kvrelay.lab.report.paper import Paper, Section
from kvrelay.lab.report.table import Table, percent
from kvrelay.lab.sim.cells import Answer, CapacityCell, EventFaults, RoutingCell

LABEL = "Simulated: no GPU, no engine, no clock"
MISS_WORDS = {
    Miss.COLD: "never seen, cold",
    Miss.NEW_SUFFIX: "never seen, new suffix",
    Miss.OTHER_WORKER: "another worker had it",
    Miss.CAPACITY: "evicted for room",
    Miss.EXPIRED: "expired",
    Miss.INVALIDATED: "invalidated",
    Miss.BELOW_BLOCK: "below a block",
}
LIMITS = (
    "Hits are counted, speed is not: nothing here says how long anything takes, how much a fleet can serve, or whether "
    "an SLO is met. Virtual time orders events and no more.",
    "Misses are told apart by what would have been: a block that nobody has computed before is no eviction, and no "
    "capacity brings it back.",
)
CAPACITY_LIMITS = (
    "Capacity rows have no concurrency: a prompt's blocks are there when it is routed, nothing is pinned while it "
    "runs, and output blocks take room in engine models only.",
    "Belady knows the future. It bounds what eviction can do with this room and is no policy to deploy.",
)
ROUTING_LIMITS = (
    "Routing rows run the gateway's own router over mock engines with vLLM's block pool. The prefill rate and the "
    "number of output tokens are hypotheses: they decide how many requests are under way at once.",
    "The text of answers is not the trace's, so generated blocks are hit only where the trace lists them in a later "
    "prompt.",
)


class Validation(Struct, frozen=True):
    """Simulated against measured hit tokens of the same request sequence on one's own fleet."""

    measured_requests: int
    measured_hit_tokens: int
    predicted_hit_tokens: int

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what was measured; None where nothing was hit."""
        if not self.measured_hit_tokens:
            return None
        return (self.predicted_hit_tokens - self.measured_hit_tokens) / self.measured_hit_tokens


def name_of(answer: Answer) -> str:
    cell = answer.cell
    if isinstance(cell, CapacityCell):
        engine = f"{cell.cache}, {cell.blocks:,} blocks"
        return engine if cell.workers == 1 else f"{engine}, {cell.router}"
    return f"{cell.policy}, {cell.blocks:,} blocks{_faults(cell.events)}"


def _faults(faults: EventFaults) -> str:
    parts = []
    if faults.delay_ms != EventFaults().delay_ms or faults.spread_ms:
        spread = f"..{faults.delay_ms + faults.spread_ms:g}" if faults.spread_ms else ""
        parts.append(f"events {faults.delay_ms:g}{spread} ms late")
    if faults.loss:
        parts.append(f"{percent(faults.loss)} lost" + ("" if faults.replay else ", no replay"))
    if faults.duplication:
        parts.append(f"{percent(faults.duplication)} twice")
    return "".join(f", {part}" for part in parts)


def hit_table(answers: Sequence[Answer]) -> Table:
    """What is hit and where the rest is lost, as shares of all prompt tokens."""
    kinds = [kind for kind in Miss if any(answer.missed_tokens[kind] for answer in answers)]
    header = ("cell", "requests", "hit tokens", "hit", *(MISS_WORDS[kind] for kind in kinds), "busiest / mean")
    rows = tuple(
        (
            name_of(answer),
            f"{answer.requests:,}",
            f"{answer.hit_tokens:,}",
            percent(answer.hit_ratio),
            *(percent(answer.missed_tokens[kind] / answer.input_tokens) for kind in kinds),
            f"{answer.max_over_mean_requests:.2f}",
        )
        for answer in answers
    )
    return Table(header, rows)


def count_table(answers: Sequence[Answer]) -> Table | None:
    """What left the caches of capacity cells; None without any."""
    capacity = [answer for answer in answers if isinstance(answer.cell, CapacityCell)]
    if not capacity:
        return None
    rows = tuple(
        (
            name_of(answer),
            f"{answer.evicted_blocks:,}",
            f"{answer.expired_blocks:,}",
            f"{answer.invalidated_blocks:,}",
            f"{answer.too_large_requests:,}",
            " + ".join(f"{tokens:,}" for tokens in (answer.hit_tokens_by_tier or {}).values()) or "one tier",
        )
        for answer in capacity
    )
    return Table(("cell", "evicted", "expired", "invalidated", "too large", "hit tokens by tier, nearest first"), rows)


def claim_table(answers: Sequence[Answer]) -> Table | None:
    """What the router believed against what was there; None without routing cells."""
    routing = [answer for answer in answers if isinstance(answer.cell, RoutingCell)]
    if not routing:
        return None
    rows = tuple(
        (
            name_of(answer),
            f"{answer.claimed_tokens:,}",
            f"{answer.claimed_not_hit_tokens:,}",
            f"{answer.hit_not_claimed_tokens:,}",
            ", ".join(f"{name} {count}" for name, count in (answer.reports or {}).items() if name != "worker_up")
            or "-",
        )
        for answer in routing
    )
    return Table(("cell", "claimed tokens", "claimed, not hit", "hit, not claimed", "reports"), rows)


def _reports(answer: Answer) -> str:
    reports = answer.reports or {}
    return ", ".join(f"{name} {count}" for name, count in reports.items() if name != "worker_up") or "-"


def limits(answers: Sequence[Answer]) -> tuple[str, ...]:
    found: tuple[str, ...] = LIMITS
    if any(isinstance(answer.cell, CapacityCell) for answer in answers):
        found += CAPACITY_LIMITS
    if any(isinstance(answer.cell, RoutingCell) for answer in answers):
        found += ROUTING_LIMITS
    return found


def paper(
    answers: Sequence[Answer],
    *,
    facts: tuple[tuple[str, str], ...],
    notes: tuple[str, ...],
    validation: str,
) -> Paper:
    sections = [
        Section(
            "Hits, and what became of the rest",
            "Every prompt token is hit or in exactly one class.",
            table=hit_table(answers),
        )
    ]
    chart = _capacity_chart(answers)
    if chart is not None:
        sections.insert(0, Section("Room and hits", chart=chart))
    counts, claims = count_table(answers), claim_table(answers)
    if counts is not None:
        sections.append(
            Section("What left the caches", "Blocks. A policy without a time to live expires nothing.", table=counts)
        )
    if claims is not None:
        text = "The claim is made when a request is routed; the hit is what the engine finds when it admits it."
        sections.append(Section("What the router believed", text, table=claims))
    sections.append(Section("How far this can be trusted", validation, points=(*limits(answers), *notes)))
    return Paper("What a simulation says about this trace", LABEL, facts, tuple(sections))


def _capacity_chart(answers: Sequence[Answer]) -> LineChart | None:
    """Only where several sizes were asked for."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for answer in answers:
        cell = answer.cell
        name = cell.cache if isinstance(cell, CapacityCell) else f"{cell.policy}{_faults(cell.events)}"
        by_name.setdefault(name, []).append((float(cell.blocks), answer.hit_ratio * 100))
    if max(len(points) for points in by_name.values()) < 2:
        return None
    return LineChart(
        title="Hit tokens by room of each worker",
        reading="Higher is better; the distance to belady is what a better eviction could still bring.",
        x_name="blocks per worker",
        y_name="hit, % of prompt tokens",
        lines=tuple(Line(name, tuple(sorted(points))) for name, points in by_name.items()),
    )
