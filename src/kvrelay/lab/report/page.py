"""Puts a view into one HTML file that needs nothing else: styles, charts, library and data are inlined.

The page's own content policy forbids every request, so a file that is passed on cannot phone home.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template

import msgspec

from kvrelay.lab.report.view import Chart, View

LIBRARIES = ("d3-7.9.0.min.js", "observable-plot-0.6.17.umd.min.js")
LICENCES = ("d3-LICENSE.txt", "observable-plot-LICENSE.txt")


def render_page(view: View) -> str:
    return Template(_text("page.html")).substitute(
        title=escape(view.title),
        label=escape(view.label.upper()),
        won=escape(view.won),
        why=escape(view.why),
        rule=escape(view.rule),
        overview=view.overview.html(),
        charts="\n".join(_chart_html(chart) for chart in view.charts),
        receipt=escape(view.receipt_words),
        facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in view.facts),
        arms=view.arms.html(),
        limitations="".join(f"<li>{escape(text)}</li>" for text in view.limitations),
        manifest=escape(view.manifest_json),
        style=_text("page.css"),
        licences="\n\n".join(_text(f"vendor/{name}") for name in LICENCES),
        libraries="\n".join(f"<script>{_script(f'vendor/{name}')}</script>" for name in LIBRARIES),
        data=_data(view),
        script=_script("page.js"),
    )


def _chart_html(chart: Chart) -> str:
    return (
        f'<figure class="chart" data-kind="{chart.kind}"><h3>{escape(chart.title)}</h3>'
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
