"""What a trace looks like: one function per chart, from the requests to SVG. None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from kvrelay.core.traces.facts import Examined
from kvrelay.core.traces.trace import Trace
from kvrelay.lab.traces.svg import bars, chart, durations, ecdf, line, linear, logarithmic, share_bar

BINS = 60
UNITS_MS = ((86_400_000, "days"), (3_600_000, "hours"), (60_000, "minutes"), (1000, "seconds"))
TIMES_MS = ((1000, "1 s"), (60_000, "1 min"), (3_600_000, "1 h"), (86_400_000, "1 d"))


class Figure(Struct, frozen=True):
    """A chart with its title and one sentence on how to read it."""

    title: str
    reading: str
    svg: str


def figures(trace: Trace, examined: Examined) -> list[Figure]:
    drawn = (draw(trace, examined) for draw in CHARTS)
    return [figure for figure in drawn if figure is not None]


def _arrivals(_trace: Trace, examined: Examined) -> Figure | None:
    times = [request.at_ms for request in examined.requests]
    span_ms = times[-1] if times else 0.0
    if not span_ms:
        return None
    unit_ms, unit = next(of for of in UNITS_MS if span_ms > 3 * of[0] or of[0] == 1000)
    edges = [span_ms / BINS * number / unit_ms for number in range(BINS + 1)]
    counts = [0] * BINS
    for at_ms in times:
        counts[min(BINS - 1, int(at_ms / span_ms * BINS))] += 1
    per_s = [count / (span_ms / BINS / 1000) for count in counts]
    x, y = linear(unit, span_ms / unit_ms), linear("", max(per_s))
    svg = chart(x, y, bars(x, y, edges, per_s, "a"), alt="requests per second over time")
    return Figure("When requests come", f"Requests per second, in {BINS} parts of the whole time.", svg)


def _lengths(trace: Trace, _examined: Examined) -> Figure | None:
    turns = [turn for session in trace.sessions for turn in session.turns]
    inputs = [max(1.0, float(turn.input_tokens)) for turn in turns]
    outputs = [max(1.0, float(turn.output_tokens)) for turn in turns]
    if not turns:
        return None
    x = logarithmic("tokens (log scale)", min(*inputs, *outputs), max(*inputs, *outputs))
    y = linear("", 1.0, text=_percent)
    body = line(x, y, ecdf(inputs), "a", steps=True) + line(x, y, ecdf(outputs), "b", steps=True)
    reading = 'Share of requests up to a length: <b class="a">input</b>, <b class="b">output</b>.'
    return Figure("How long prompts and answers are", reading, chart(x, y, body, alt="lengths of inputs and outputs"))


def _sharing(_trace: Trace, examined: Examined) -> Figure | None:
    caches = examined.facts.endless_cache
    shares = caches[-1].block_shares if caches else None
    if shares is None:
        return None
    parts = [
        ("own", "sent before by the same session", shares.same_session),
        ("kin", "by its parent or a sub-agent", shares.family),
        ("others", "by other sessions", shares.other_sessions),
        ("new", "never sent before", shares.never_seen),
    ]
    reading = f"Of all blocks ({caches[-1].tail_rule_means}): who had sent them before."
    if examined.facts.derived_sessions is not None:
        reading += " Sessions are derived from shared blocks."
    return Figure("Where reuse comes from", reading, share_bar(parts))


def _hit_over_time(_trace: Trace, examined: Examined) -> Figure | None:
    requests = examined.requests
    if not examined.facts.endless_cache or len(requests) < 2:
        return None
    parts = min(BINS, len(requests))
    points = []
    for number in range(parts):
        own = requests[number * len(requests) // parts : (number + 1) * len(requests) // parts]
        tokens = sum(request.input_tokens for request in own)
        points.append((number + 0.5, sum(request.hit_tokens for request in own) / tokens if tokens else 0.0))
    scale = len(requests) / parts
    x, y = linear("requests", len(requests)), linear("", 1.0, text=_percent)
    body = line(x, y, [(at * scale, hit) for at, hit in points], "a")
    reading = "Hit tokens of input tokens with an endless cache, request after request: how long filling takes."
    return Figure("How the hit rate develops", reading, chart(x, y, body, alt="hit rate over the requests"))


def _idle(_trace: Trace, examined: Examined) -> Figure | None:
    weighted = sorted((max(1.0, r.idle_ms), r.hit_tokens) for r in examined.requests if r.idle_ms is not None)
    total = sum(tokens for _, tokens in weighted)
    if not total or weighted[-1][0] <= 1.0:
        return None
    points, reached, last = [(weighted[0][0], 0.0)], 0, 0.0
    for idle_ms, tokens in weighted:
        reached += tokens
        if reached / total - last >= 0.004:
            last = reached / total
            points.append((idle_ms, last))
    points.append((weighted[-1][0], 1.0))
    x = durations("time since the last use (log scale)", points[0][0], points[-1][0])
    y = linear("", 1.0, text=_percent)
    kept = "; ".join(f"{_share_within(weighted, ms):.0%} within {text}" for ms, text in TIMES_MS)
    reading = f"Share of all hit tokens by how long they had lain unused: {kept}."
    svg = chart(x, y, line(x, y, points, "a", steps=True), alt="idle time of reused blocks")
    return Figure("How long a cache must remember", reading, svg)


def _turns(trace: Trace, _examined: Examined) -> Figure | None:
    turns = [float(len(session.turns)) for session in trace.sessions]
    if not turns or max(turns) <= 1:
        return None
    x = logarithmic("turns (log scale)", min(turns), max(turns))
    y = linear("", 1.0, text=_percent)
    svg = chart(x, y, line(x, y, ecdf(turns), "a", steps=True), alt="turns per session")
    return Figure("How long sessions are", "Share of sessions (and sub-agents) up to a number of turns.", svg)


CHARTS: tuple[Callable[[Trace, Examined], Figure | None], ...] = (
    _sharing,
    _hit_over_time,
    _idle,
    _lengths,
    _turns,
    _arrivals,
)


def _share_within(weighted: Sequence[tuple[float, int]], ms: float) -> float:
    return sum(tokens for idle_ms, tokens in weighted if idle_ms <= ms) / sum(tokens for _, tokens in weighted)


def _percent(share: float) -> str:
    return f"{share:.0%}"
