"""Small charts as inline SVG: no script, so they print, and stay readable in a file that is passed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 560, 236
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 12, 46
DURATIONS_MS = (1.0, 10.0, 100.0, 1e3, 1e4, 6e4, 6e5, 3.6e6, 8.64e7, 8.64e8)


class Axis(Struct, frozen=True):
    """`place` maps a value to 0..1; ticks are (value, text)."""

    label: str
    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


def short(value: float) -> str:
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:g}{unit}"
    return f"{value:g}"


def linear(label: str, most: float, *, text: Callable[[float], str] = short) -> Axis:
    """From 0 to `most`, with round ticks."""
    most = most if most > 0 else 1.0
    step = _round_step(most / 5)
    count = int(most / step + 1e-9) + 1
    return Axis(label, lambda value: value / most, tuple((n * step, text(n * step)) for n in range(count)))


def logarithmic(label: str, least: float, most: float, *, text: Callable[[float], str] = short) -> Axis:
    """Just around the values, with ticks at powers of ten (and between, if they are few); `least` must be above 0."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most) + 0.05)
    factors = (1, 2, 5) if math.log10(most / least) < 2 else (1,)
    return _log_axis(label, least, most, [(f * 10.0**n, text(f * 10.0**n)) for n in range(low, high) for f in factors])


def durations(label: str, least_ms: float, most_ms: float) -> Axis:
    """The same for times, with ticks as people count them."""
    return _log_axis(label, least_ms, most_ms, [(ms, duration(ms)) for ms in DURATIONS_MS])


def _log_axis(label: str, least: float, most: float, ticks: Sequence[tuple[float, str]]) -> Axis:
    low, high = math.log10(least), math.log10(max(most, least * 1.5))
    shown = tuple((at, text) for at, text in ticks if low - 0.05 <= math.log10(at) <= high + 0.05)
    return Axis(label, lambda value: (math.log10(max(value, least)) - low) / (high - low), shown)


def chart(x: Axis, y: Axis, body: str, *, alt: str) -> str:
    """A framed plot; `body` holds marks made by the functions below."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(alt)}">']
    for value, text in y.ticks:
        at = y_of(y, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in x.ticks:
        at, below = x_of(x, value), HEIGHT - BOTTOM + 22
        parts.append(f'<text class="tick" x="{at:.1f}" y="{below}" text-anchor="middle">{escape(text)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.1f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x.label)}</text>')
    return "".join([*parts, body, "</svg>"])


def line(x: Axis, y: Axis, points: Sequence[tuple[float, float]], kind: str, *, steps: bool = False) -> str:
    """A polyline; with `steps` each value holds until the next point."""
    path = ""
    for index, (a, b) in enumerate(points):
        at, height = x_of(x, a), y_of(y, b)
        if index == 0:
            path = f"M{at:.1f} {height:.1f}"
        else:
            path += f"H{at:.1f}V{height:.1f}" if steps else f"L{at:.1f} {height:.1f}"
    return f'<path class="line {kind}" d="{path}"/>'


def bars(x: Axis, y: Axis, edges: Sequence[float], heights: Sequence[float], kind: str) -> str:
    """One bar between each two edges."""
    drawn, floor = [], y_of(y, 0)
    for low, high, height in zip(edges, edges[1:], heights, strict=False):
        left, right, top = x_of(x, low), x_of(x, high), y_of(y, height)
        width = max(0.8, right - left - 0.8)
        drawn.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{floor - top:.1f}"/>'
        )
    return "".join(drawn)


def share_bar(parts: Sequence[tuple[str, str, float]]) -> str:
    """One bar of (class, name, share) that fills the width, with its legend below."""
    bar, row = 48, 36
    height = bar + row * len(parts)
    drawn = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(_spoken(parts))}">']
    at = 0.0
    for number, (kind, name, share) in enumerate(parts):
        width = share * WIDTH
        if width > 0:
            drawn.append(f'<rect class="{kind}" x="{at:.1f}" y="0" width="{max(0.5, width - 1):.1f}" height="{bar}"/>')
        at += width
        top = bar + row * (number + 0.75)
        drawn.append(f'<rect class="{kind}" x="0" y="{top - 12:.0f}" width="13" height="13"/>')
        drawn.append(f'<text class="name" x="22" y="{top:.0f}">{escape(name)}</text>')
        drawn.append(f'<text class="name" x="{WIDTH}" y="{top:.0f}" text-anchor="end">{share:.1%}</text>')
    return "".join([*drawn, "</svg>"])


def ecdf(values: Sequence[float], *, points: int = 160) -> list[tuple[float, float]]:
    """(value, share of all that are at most that), thinned to what a chart can show."""
    ordered = sorted(values)
    step = max(1, len(ordered) // points)
    picked = [*range(step - 1, len(ordered), step)]
    if not picked or picked[-1] != len(ordered) - 1:
        picked.append(len(ordered) - 1)
    return [(ordered[0], 0.0), *((ordered[n], (n + 1) / len(ordered)) for n in picked)]


def duration(ms: float) -> str:
    """The largest unit that leaves a number of at least 1."""
    for factor, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if ms >= factor:
            return f"{ms / factor:.3g} {unit}"
    return f"{ms:.3g} ms"


def x_of(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def y_of(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


def _spoken(parts: Sequence[tuple[str, str, float]]) -> str:
    return ", ".join(f"{name} {share:.1%}" for _, name, share in parts)
