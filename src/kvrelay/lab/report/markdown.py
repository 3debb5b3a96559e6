"""A view as Markdown, for a pull request or a ticket: the same sections and figures as the page, without the charts."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.lab.report.table import Table
from kvrelay.lab.report.verdict_view import VerdictView
from kvrelay.lab.report.view import View


def render_markdown(view: View) -> str:
    parts = [f"# {view.title}", f"**{view.label.upper().replace('_', ' ')}**: {view.label_words}."]
    parts += _verdict(view.verdict)
    parts += ["## Figures", view.overview.markdown(), _origins(view.overview)]
    parts += ["## Evaluated together", view.together.markdown()]
    parts += ["## Failures", view.failures.markdown()]
    for chart in view.charts:
        parts += [f"## {chart.title}", chart.reading, chart.table.markdown()]
    parts += ["## First requests on a fresh worker", view.first_wave.markdown()]
    parts += ["## What this run cannot show", _list(view.limitations)]
    parts += ["## The run", _list(f"{name}: {value}" for name, value in view.facts)]
    parts += [view.arms.markdown(), "## The engines' own counters", view.counters.markdown()]
    return "\n\n".join(parts) + "\n"


def _verdict(verdict: VerdictView) -> list[str]:
    word = "" if verdict.word == "ranking" else f"{verdict.word.upper()}: "
    parts = [f"## {verdict.heading}", f"**{word}{verdict.sentence}**", _list(verdict.reasons)]
    parts.append("; ".join(verdict.chips) + ".")
    parts.append(_list(f"{name}: {value}" for name, value in verdict.facts))
    if verdict.judges is not None:
        parts.append(verdict.judges.markdown())
    if verdict.gates is not None:
        parts.append(verdict.gates.markdown())
    return parts


def _origins(table: Table) -> str:
    """Which column is what: a table without marks would let a claim pass for a fact."""
    by_origin: dict[str, list[str]] = {}
    for name, origin in zip(table.header[1:], table.origins, strict=False):
        by_origin.setdefault(origin.value, []).append(name)
    return "; ".join(f"*{origin}*: {', '.join(names)}" for origin, names in by_origin.items()) + "."


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
