"""One HTML file of text, tables and line charts that needs nothing else and runs nothing.

It is what sizing and simulation hand over. The page's own content policy forbids every request and every script.
"""

from __future__ import annotations

from html import escape
from importlib import resources

from msgspec import Struct

from kvrelay.lab.report.line_chart import LineChart
from kvrelay.lab.report.table import Table

_STYLE = """
svg.lines { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg.lines text { fill: var(--muted); }
svg.lines text.name { fill: var(--ink); font-size: 12px; }
svg.lines polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg.lines line.grid { stroke: var(--line); stroke-width: 1; }
svg.lines line.mark { stroke: var(--mark); stroke-dasharray: 4 3; }
svg.lines text.mark { fill: var(--mark); }
ul.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; font-size: 0.85rem; }
ul.legend span { display: inline-block; width: 1.1rem; height: 0.25rem; margin-right: 0.4rem; vertical-align: middle; }
"""


class Section(Struct, frozen=True):
    """A heading with what stands under it, in this order."""

    title: str
    text: str = ""
    chart: LineChart | None = None
    table: Table | None = None
    points: tuple[str, ...] = ()


class Paper(Struct, frozen=True):
    title: str
    label: str  # what the figures are, never to be cut off from them
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


def render_paper(paper: Paper) -> str:
    style = (resources.files("kvrelay.lab.report") / "page.css").read_text(encoding="utf-8") + _STYLE
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in paper.facts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(paper.title)}</title><style>{style}</style></head><body><main>"
        f'<p class="label"><strong>{escape(paper.label)}</strong></p><h1>{escape(paper.title)}</h1>'
        + "".join(map(_section, paper.sections))
        + f"<h2>What this was made from</h2><dl>{facts}</dl></main></body></html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.chart is not None:
        parts.append(section.chart.html())
    if section.table is not None:
        parts.append(section.table.html())
    if section.points:
        parts.append("<ul>" + "".join(f"<li>{escape(point)}</li>" for point in section.points) + "</ul>")
    return "".join(parts)
