"""Line charts as SVG text, for pages that hold nothing but text: no script, no library, readable when printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 48
_COLOURS = ("var(--w0)", "var(--w1)", "var(--w2)", "var(--w3)", "var(--w4)", "var(--w5)", "var(--w6)", "var(--w7)")
_DASHES = ("", "6 3", "2 3", "10 3 2 3")


class Line(Struct, frozen=True):
    """Points in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]


class Mark(Struct, frozen=True):
    """A vertical line at a place that the text speaks of."""

    x: float
    name: str


class LineChart(Struct, frozen=True):
    """`log_x`: a logarithmic x axis, on which every point must be above 0. `top`: where the y axis ends."""

    title: str
    reading: str  # how to read it, one sentence
    x_name: str
    y_name: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    log_x: bool = True
    log_y: bool = False
    top: float | None = None

    def html(self) -> str:
        return (
            f'<figure class="chart"><h3>{escape(self.title)}</h3><figcaption>{escape(self.reading)}</figcaption>'
            f"{self._svg()}{self._legend()}</figure>"
        )

    def _svg(self) -> str:
        xs = [x for line in self.lines for x, _ in line.points] or [1.0, 10.0]
        ys = [y for line in self.lines for _, y in line.points if y > 0 or not self.log_y] or [0.0, 1.0]
        across = _Scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, self.log_x)
        low = min(ys) if self.log_y else 0.0
        up = _Scale(low, self.top or max(ys) * 1.05 or 1.0, HEIGHT - _BOTTOM, _TOP, self.log_y)
        parts = [self._grid(across, up)]
        for mark in self.marks:
            at = across(mark.x)
            anchor = "end" if at > WIDTH * 0.7 else "start"
            shift = -5 if anchor == "end" else 5
            parts.append(
                f'<line class="mark" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{HEIGHT - _BOTTOM}"/>'
                f'<text class="mark" x="{at + shift:.1f}" y="{_TOP + 12}" text-anchor="{anchor}">'
                f"{escape(mark.name)}</text>"
            )
        for number, line in enumerate(self.lines):
            path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points if y > 0 or not self.log_y)
            dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
            parts.append(
                f'<polyline points="{path}" style="stroke:{_COLOURS[number % len(_COLOURS)]}" '
                f'stroke-dasharray="{dash}"><title>{escape(line.name)}</title></polyline>'
            )
        return (
            f'<svg class="lines" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            + "".join(parts)
            + "</svg>"
        )

    def _grid(self, across: _Scale, up: _Scale) -> str:
        parts = []
        for x in across.ticks():
            at = across(x)
            parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{HEIGHT - _BOTTOM}"/>')
            parts.append(f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{short(x)}</text>')
        for y in up.ticks():
            at = up(y)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{short(y)}</text>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(
            f'<text class="name" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x_name)}</text>'
        )
        centre = (_TOP + HEIGHT - _BOTTOM) / 2
        parts.append(
            f'<text class="name" transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_name)}</text>"
        )
        return "".join(parts)

    def _legend(self) -> str:
        items = "".join(
            f'<li><span style="background:{_COLOURS[number % len(_COLOURS)]}"></span>{escape(line.name)}</li>'
            for number, line in enumerate(self.lines)
        )
        return f'<ul class="legend">{items}</ul>'


class _Scale:
    """From values to places on the paper."""

    def __init__(self, low: float, high: float, start: float, end: float, logarithmic: bool) -> None:
        if high <= low:
            high = low * 2 if low > 0 else low + 1.0
        self._low, self._high = low, high
        self._start, self._end = start, end
        self._log = logarithmic

    def __call__(self, value: float) -> float:
        if self._log:
            share = math.log(value / self._low) / math.log(self._high / self._low)
        else:
            share = (value - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> Sequence[float]:
        return self._powers() if self._log else self._even()

    def _powers(self) -> list[float]:
        steps = (1, 2, 5) if self._high / self._low < 1000 else (1,)
        first, last = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [value for value in found if self._low * 0.999 <= value <= self._high * 1.001]

    def _even(self) -> list[float]:
        rough = (self._high - self._low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first = math.ceil(self._low / step)
        return [number * step for number in range(first, math.floor(self._high / step) + 1)]


def short(value: float) -> str:
    """A figure for an axis."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
