"""Puts a view into one HTML file that needs nothing else: styles, charts, library and data are inlined.

The page's own content policy forbids every request, so a file that is passed on cannot phone home.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources
from string import Template

import msgspec

from kvrelay.lab.report.chart import Chart
from kvrelay.lab.report.table import Origin
from kvrelay.lab.report.verdict_view import VerdictView
from kvrelay.lab.report.view import View

LIBRARIES = ("d3-7.9.0.min.js", "observable-plot-0.6.17.umd.min.js")
LICENCES = ("d3-LICENSE.txt", "observable-plot-LICENSE.txt")


def render_page(view: View) -> str:
    return Template(_text("page.html")).substitute(
        title=escape(view.title),
        label=escape(view.label.upper().replace("_", " ")),
        label_words=escape(view.label_words),
        verdict=_verdict_html(view.verdict),
        overview=view.overview.html(),
        legend=_legend(),
        together=view.together.html(),
        failures=view.failures.html(),
        charts="\n".join(_chart_html(chart) for chart in view.charts),
        first_wave=view.first_wave.html(),
        receipt=escape(view.receipt_words),
        facts=_facts_html(view.facts),
        arms=view.arms.html(),
        counters=view.counters.html(),
        limitations=_items(view.limitations),
        manifest=escape(view.manifest_json),
        style=_text("page.css"),
        licences="\n\n".join(_text(f"vendor/{name}") for name in LICENCES),
        libraries="\n".join(f"<script>{_script(f'vendor/{name}')}</script>" for name in LIBRARIES),
        data=_data(view),
        script=_script("page.js"),
    )


def _verdict_html(verdict: VerdictView) -> str:
    reasons = "" if not verdict.reasons else f'<ul class="reasons">{_items(verdict.reasons)}</ul>'
    chips = "".join(f"<span>{escape(chip)}</span>" for chip in verdict.chips)
    tables = "".join(
        f'<h3>{title}</h3><div class="{name}">{table.html()}</div>'
        for title, name, table in (
            ("The three final judges", "judges", verdict.judges),
            ("Every gate", "gates", verdict.gates),
        )
        if table is not None
    )
    return (
        f'<section class="verdict {escape(verdict.word)}" aria-labelledby="verdict"><div class="stamp">'
        f'<h2 id="verdict">{escape(verdict.heading)}</h2><p class="word">{escape(verdict.word)}</p>'
        f'<p class="won">{escape(verdict.sentence)}</p>{reasons}<p class="chips">{chips}</p></div>{tables}'
        f"<dl>{_facts_html(verdict.facts)}</dl></section>"
    )


def _legend() -> str:
    """What the marks beside column names mean."""
    words = {
        Origin.MEASURED: "read from an engine, a clock or a wire in this run",
        Origin.MODELLED: "read in the same way, from mock workers whose times follow from stated rates",
        Origin.DERIVED: "computed from numbers of this run",
        Origin.STATED: "said by an operator or a vendor",
    }
    marks = (f'<abbr class="origin">{origin.value[:3]}</abbr> {text}' for origin, text in words.items())
    return "; ".join(marks) + "."


def _facts_html(facts: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _chart_html(chart: Chart) -> str:
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}" data-kind="{chart.kind}"><h3>{escape(chart.title)}</h3>'
        f'<figcaption>{escape(chart.reading)}</figcaption><div class="plot"></div>'
        f"<details><summary>The numbers</summary>{chart.table.html()}</details></figure>"
    )


def _data(view: View) -> str:
    charts = {chart.kind: {"title": chart.title, "rows": chart.rows} for chart in view.charts}
    encoded = msgspec.json.encode({"charts": charts, "policies": view.policies, "workers": view.workers})
    return encoded.decode().replace("<", "\\u003c")  # cannot close the script element, whatever a name holds


def _script(name: str) -> str:
    text = _text(name)
    assert "</script" not in text, name
    return text


def _text(name: str) -> str:
    return (resources.files("kvrelay.lab.report") / name).read_text(encoding="utf-8")
