"""A drill as a picture: time from left to right, a lane per worker, a mark per request, a line per blow."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from kvrelay.lab.drills.history import History, Outcome

WIDTH, LANE, TOP, LEFT, BOTTOM = 960, 34, 46, 92, 26
COLOURS = {"ok": "#2f855a", "refused": "#b7791f", "broken": "#c53030", "left": "#718096", "gateway_lost": "#805ad5"}
NOBODY = "nobody"
Scale = Callable[[float], float]


def timeline_svg(history: History) -> str:
    """Requests begin at their dot and end at the end of its tail."""
    lanes = sorted({outcome.worker or NOBODY for outcome in history.outcomes})
    end_s = max(_last_moments(history), default=1.0) or 1.0
    height = TOP + LANE * len(lanes) + BOTTOM

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - 16) * min(max(at_s, 0.0), end_s) / end_s

    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="requests over time, by worker">']
    for number, lane in enumerate(lanes):
        y = TOP + LANE * number
        shade = "#f7fafc" if number % 2 else "#edf2f7"
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 16}" height="{LANE}" fill="{shade}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + LANE / 2 + 4}" text-anchor="end" class="lane">{escape(lane)}</text>'
        )
    parts += _blows(history, x, height)
    counts: dict[str, int] = {}
    for outcome in history.outcomes:
        lane = outcome.worker or NOBODY
        counts[lane] = counts.get(lane, 0) + 1
        parts.append(_mark(outcome, x, TOP + LANE * lanes.index(lane), counts[lane]))
    parts.append(f'<text x="{LEFT}" y="{height - 8}" class="axis">0 s</text>')
    parts.append(f'<text x="{WIDTH - 16}" y="{height - 8}" text-anchor="end" class="axis">{end_s:.1f} s</text>')
    parts += _legend({outcome.ending for outcome in history.outcomes}, height)
    return "".join([*parts, "</svg>"])


def _last_moments(history: History) -> list[float]:
    return [
        *(outcome.ended_s or outcome.at_s for outcome in history.outcomes),
        *(deed.at_s for deed in history.deeds),
        *(view.at_s for view in history.views),
    ]


def _mark(outcome: Outcome, x: Scale, top: float, number: int) -> str:
    """Neighbours are set apart a little, so that a burst is seen as one."""
    y = top + 6 + (number * 7) % (LANE - 12)
    colour = COLOURS.get(outcome.ending, "#1a202c")
    title = f"<title>{escape(outcome.id)}: {outcome.ending} at {outcome.at_s:.3f} s</title>"
    ended_s = outcome.ended_s or outcome.at_s
    line = f'x1="{x(outcome.at_s):.1f}" y1="{y}" x2="{x(ended_s):.1f}" y2="{y}"'
    tail = f'<line {line} stroke="{colour}" stroke-opacity=".45"/>'
    return f'<g>{title}{tail}<circle cx="{x(outcome.at_s):.1f}" cy="{y}" r="2.6" fill="{colour}"/></g>'


def _blows(history: History, x: Scale, height: int) -> list[str]:
    """Two rows of names in turn, and no name over another."""
    parts, free_from = [], [0.0, 0.0]
    for deed in history.deeds:
        at = x(deed.at_s)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{height - BOTTOM}" class="blow"/>')
        row = next((row for row in (0, 1) if at >= free_from[row]), None)
        if row is not None:
            words = f"{deed.kind} {deed.worker or ''}".strip()
            free_from[row] = at + 6.2 * len(words) + 8
            parts.append(f'<text x="{at + 3:.1f}" y="{14 + 16 * row}" class="blow-name">{escape(words)}</text>')
            parts.append(f'<line x1="{at:.1f}" y1="{6 + 16 * row}" x2="{at:.1f}" y2="{TOP}" class="blow"/>')
    return parts


def _legend(endings: set[str], height: int) -> list[str]:
    parts, at = [], LEFT + 60
    for ending in COLOURS:
        if ending in endings:
            parts.append(f'<circle cx="{at}" cy="{height - 12}" r="4" fill="{COLOURS[ending]}"/>')
            parts.append(f'<text x="{at + 8}" y="{height - 8}" class="axis">{ending.replace("_", " ")}</text>')
            at += 30 + 7 * len(ending)
    return parts
