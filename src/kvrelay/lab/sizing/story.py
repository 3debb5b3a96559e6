"""A sizing as tables and as a page."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.sizing.breakeven import Link, Point, Prefill, breakeven_tokens, point
from kvrelay.core.sizing.memory import MemoryVerdict
from kvrelay.lab.report.line_chart import Line, LineChart, Mark
from kvrelay.lab.report.paper import Paper, Section
from kvrelay.lab.report.table import Table, percent
from kvrelay.lab.sizing.sizing import METADATA_BYTES_PER_OBJECT, Sizing

LABEL = "Computed from a trace: capacity and hits, no speed of any engine"
DECISION_TOKENS = (256, 1024, 4096, 16_384, 65_536)
PREFIX_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
KNEE_RULE = (
    "The knee is the capacity at which the curve lies farthest above the straight line from nothing to the largest "
    "useful capacity, both axes taken from 0 to 1: up to there a GB brings more than on average, from there on less."
)
REUSE_WORDS = "How many different blocks are used until a block is used again: the room that this reuse needs."
LIMITS = (
    "Every figure is LRU with one shared cache and no concurrency. Several workers with caches of their own hit less, "
    "unless the router brings every request to its prefix (`kvrelay simulate`).",
    "A trace says what was asked on some days by some users. Yours differ; measure, size, and measure again.",
)


def gb(amount_bytes: float) -> str:
    return f"{amount_bytes / 1e9:,.3g} GB" if amount_bytes < 1e11 else f"{amount_bytes / 1e9:,.0f} GB"


def step_table(sizing: Sizing) -> Table:
    rows = tuple(
        (
            gb(step.capacity_bytes),
            f"{step.capacity_blocks:,}",
            f"{step.hit_tokens:,.0f}",
            percent(step.hit_ratio),
            "-" if step.gain_tokens_per_gb is None else f"{step.gain_tokens_per_gb:,.0f}",
        )
        for step in sizing.steps
    )
    return Table(("capacity", "blocks", "hit tokens", "hit", "further hit tokens per further GB"), rows)


def knee_words(sizing: Sizing) -> str:
    bend = sizing.knee
    if bend is None:
        return "This trace re-uses nothing, so no capacity helps."
    most = sizing.curve.most_hits
    beyond_gb = sizing.bytes_of(sizing.curve.largest_useful_blocks - bend.capacity_blocks) / 1e9
    beyond = (most - bend.hit_tokens) / beyond_gb if beyond_gb > 0 else 0.0
    up_to = bend.hit_tokens / (sizing.bytes_of(bend.capacity_blocks) / 1e9)
    return (
        f"Knee at {gb(sizing.bytes_of(bend.capacity_blocks))} ({bend.capacity_blocks:,} blocks): "
        f"{bend.hit_tokens:,.0f} hit tokens, {percent(bend.share_of_most)} of what "
        f"{gb(sizing.bytes_of(sizing.curve.largest_useful_blocks))} and more would "
        f"hit. A GB brings {up_to:,.0f} tokens up to there and {beyond:,.0f} beyond."
    )


def histogram_table(sizing: Sizing) -> Table:
    total = sizing.curve.most_hits or 1.0
    rows = tuple(
        (f"up to {upper:,} blocks ({gb(sizing.bytes_of(upper))})", f"{tokens:,.0f}", percent(tokens / total))
        for upper, tokens in sizing.histogram
        if tokens
    )
    return Table(("reuse distance", "re-used tokens", "share"), rows)


def tier_table(sizing: Sizing) -> Table | None:
    if not sizing.tiers:
        return None
    rows = tuple(
        (row.tier, gb(sizing.bytes_of(row.capacity_blocks)), f"{row.hit_tokens:,.0f}", percent(row.share_of_hits))
        for row in sizing.tiers
    )
    return Table(("tier", "capacity", "hit tokens", "share of hits"), rows)


def split_table(sizing: Sizing) -> Table:
    rows = tuple(
        (
            f"{gb(row.near_bytes)} near + {gb(row.far_bytes)} far",
            f"{row.hit_tokens:,.0f}",
            percent(row.far_read_share),
            gb(row.host_memory_bytes),
        )
        for row in sizing.splits
    )
    return Table(("split", "hit tokens", "read from far", "host memory"), rows)


def chunk_table(sizing: Sizing) -> Table:
    rows = tuple(
        (
            f"{row.chunk_tokens} tokens",
            f"{row.hit_tokens:,.0f}",
            percent(row.hit_ratio),
            f"{row.objects:,}",
            gb(row.metadata_bytes),
            percent(row.transfer_efficiency),
        )
        for row in sizing.chunks
    )
    return Table(("chunk", "hit tokens", "hit", "objects", "metadata", "transfer efficiency"), rows)


def cost_table(sizing: Sizing) -> Table | None:
    if not sizing.costs:
        return None
    rows = tuple(
        (gb(row.capacity_bytes), f"{row.cost_per_hour:,.4f}", f"{row.saved_per_hour:,.4f}", f"{row.net_per_hour:+,.4f}")
        for row in sizing.costs
    )
    best = max(range(len(rows)), key=lambda at: sizing.costs[at].net_per_hour)
    marked = tuple(at == best for at in range(len(rows)))
    return Table(("capacity", "cost per hour", "saved prefill per hour", "net per hour"), rows, marked)


def memory_words(verdict: MemoryVerdict) -> str:
    verdict_word = "fits" if verdict.safe else "does not fit"
    return (
        f"Memory: {gb(verdict.asked_bytes)} of cache {verdict_word}: host {gb(verdict.host_bytes)} - engine "
        f"{gb(verdict.engine_bytes)} - buffer {gb(verdict.buffer_bytes)} leaves {gb(verdict.most_bytes)}."
    )


def decision_table(links: Sequence[Link], rates: Sequence[Prefill], *, bytes_per_token: float) -> Table:
    """Fetch or compute, for every link and rate, by prefix length; and how many times as long the other would take."""
    header = ("from, against", *(f"{tokens:,}" for tokens in DECISION_TOKENS), "worth fetching from")
    rows = []
    for rate in rates:
        for link in links:
            decisions = [_decision(point(n, link, rate, bytes_per_token=bytes_per_token)) for n in DECISION_TOKENS]
            least = breakeven_tokens(link, rate, bytes_per_token=bytes_per_token)
            last = "never" if least is None else f"{least:,} tokens"
            rows.append((f"{link.name}, {rate.name}", *decisions, last))
    return Table(header, tuple(rows))


def _decision(found: Point) -> str:
    if found.fetch:
        return f"fetch {found.compute_s / found.fetch_s:.1f}x"
    return f"compute {found.fetch_s / found.compute_s:.1f}x"


def boundary_table(links: Sequence[Link], rates: Sequence[Prefill], *, bytes_per_token: float) -> Table:
    """Per link, rate and prefix length."""
    rows = []
    for rate in rates:
        for link in links:
            found = [point(n, link, rate, bytes_per_token=bytes_per_token) for n in DECISION_TOKENS]
            rows.append((f"{link.name}, {rate.name}", *map(_boundary, found)))
    return Table(("from, against", *(f"{tokens:,}" for tokens in DECISION_TOKENS)), tuple(rows))


def _boundary(found: Point) -> str:
    least, most = found.breakeven_bytes_per_s, found.breakeven_latency_s
    bandwidth = "none" if least is None else f"{least / 1e9:,.3g} GB/s"
    latency = "none" if most is None else f"{most * 1000:,.4g} ms"
    return f"{bandwidth}, {latency}"


def breakeven_chart(links: Sequence[Link], rates: Sequence[Prefill], *, bytes_per_token: float) -> LineChart:
    lines = [
        Line(
            f"compute at {rate.name}",
            tuple((float(tokens), tokens / rate.tokens_per_s * 1000) for tokens in PREFIX_TOKENS),
        )
        for rate in rates
    ]
    lines += [
        Line(
            f"fetch from {link.name}",
            tuple(
                (float(tokens), (link.latency_s + tokens * bytes_per_token / link.bytes_per_s) * 1000)
                for tokens in PREFIX_TOKENS
            ),
        )
        for link in links
    ]
    return LineChart(
        title="Fetching a prefix against computing it",
        reading="Where a fetch line lies below a compute line, fetching wins; they cross at the break-even length.",
        x_name="prefix, tokens",
        y_name="milliseconds",
        lines=tuple(lines),
        log_y=True,
    )


def curve_chart(sizing: Sizing) -> LineChart:
    curve = sizing.curve
    largest = max(curve.largest_useful_blocks, 2)
    picked = sorted({max(1, int(largest * 1000.0 ** (at / 200 - 1))) for at in range(201)})
    points = tuple((sizing.bytes_of(blocks) / 1e9, curve.ratio_at(blocks) * 100) for blocks in picked)
    marks: tuple[Mark, ...] = ()
    if sizing.knee is not None:
        marks = (Mark(sizing.bytes_of(sizing.knee.capacity_blocks) / 1e9, "knee"),)
    name = "LRU, exact" if sizing.sample_rate == 1 else f"LRU, a sample of {percent(sizing.sample_rate)}"
    return LineChart(
        title="Hit tokens by capacity",
        reading="One shared LRU cache. To the right of the knee a GB brings less than on average.",
        x_name="capacity, GB",
        y_name="hit, % of prompt tokens",
        lines=(Line(name, points),),
        marks=marks,
    )


def sizing_sections(sizing: Sizing) -> list[Section]:
    sections = [
        Section("Capacity", knee_words(sizing) + " " + KNEE_RULE, chart=curve_chart(sizing), table=step_table(sizing)),
        Section(
            "Reuse distances",
            REUSE_WORDS,
            table=histogram_table(sizing),
        ),
    ]
    tiers, costs = tier_table(sizing), cost_table(sizing)
    if tiers is not None:
        sections.append(Section("Tiers", "Nearest first; what one tier evicts goes down to the next.", table=tiers))
    if sizing.splits:
        text = f"The same amount, split; host memory is the near tier and {METADATA_BYTES_PER_OBJECT} bytes per block."
        sections.append(Section("Near and far", text, table=split_table(sizing)))
    if sizing.chunks:
        text = (
            "The same room, cut in chunks. Small ones match more of a prompt; large ones cost less around the payload."
        )
        sections.append(Section("Chunk sizes", text, table=chunk_table(sizing), points=sizing.skipped_chunks))
    if costs is not None:
        sections.append(Section("Money", "At the prices given; the best net is marked.", table=costs))
    return sections


def breakeven_sections(links: Sequence[Link], rates: Sequence[Prefill], *, bytes_per_token: float) -> list[Section]:
    boundaries = boundary_table(links, rates, bytes_per_token=bytes_per_token)
    decisions = Section(
        "Fetch or compute",
        "By prefix length in tokens: the decision, and how many times as long the other way would take.",
        chart=breakeven_chart(links, rates, bytes_per_token=bytes_per_token),
        table=decision_table(links, rates, bytes_per_token=bytes_per_token),
    )
    text = (
        "By prefix length in tokens: the least bandwidth at the stated latency, the largest latency at that bandwidth."
    )
    return [decisions, Section("Where the two are equal", text, table=boundaries)]


def paper(sections: Sequence[Section], *, facts: tuple[tuple[str, str], ...], notes: tuple[str, ...]) -> Paper:
    trust = Section("How far this can be trusted", points=(*LIMITS, *notes))
    return Paper("How much cache is enough", LABEL, facts, (*sections, trust))
