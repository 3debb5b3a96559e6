"""The page of one drill: what an operator reads before it, and what is shown of it afterwards.

Target, baseline, blow, acceptance and rollback come from the drill, verdicts and evidence from the history. The same
page as Markdown and as one HTML file that needs nothing else.
"""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path
from string import Template

import msgspec
from msgspec import Struct

from kvrelay.core.stats.distribution import distribution
from kvrelay.lab.drills.drill import Do, Drill, Look, Send, Settle, Step, Wait
from kvrelay.lab.drills.history import History
from kvrelay.lab.drills.promises import GENERAL
from kvrelay.lab.drills.run import DrillResult, Judged
from kvrelay.lab.drills.timeline import timeline_svg
from kvrelay.lab.report.table import Table

LABELS = {
    "simulated": "SIMULATED: virtual time; says nothing about speed",
    "mock": "MOCK WORKERS: no model, no GPU; times follow from stated rates",
    "attached": "ATTACHED FLEET",
}
UNJUDGED = "not run yet"


class Page(Struct, frozen=True, kw_only=True):
    """All that both forms show."""

    name: str
    title: str
    verdict: str
    label: str
    sections: tuple[tuple[str, str], ...]  # heading, one paragraph
    steps: tuple[str, ...]
    promises: Table
    requests: Table | None
    deeds: Table | None
    timeline: str
    notes: tuple[str, ...]


def page_of(drill: Drill, result: DrillResult | None) -> Page:
    judged = result.promises if result is not None and result.promises else _unjudged(drill)
    history = None if result is None else result.history
    return Page(
        name=drill.name,
        title=drill.title,
        verdict=UNJUDGED if result is None else result.verdict,
        label="" if result is None else LABELS.get(result.fleet, result.fleet),
        sections=(
            ("Why", drill.why),
            ("Target", _target(drill, history)),
            ("Baseline", drill.baseline),
            ("What is broken", drill.breaks),
            ("Rollback", drill.rollback),
        ),
        steps=tuple(_in_words(step) for step in drill.steps),
        promises=Table(("promise", "verdict", "observed"), tuple((j.promise, j.verdict, j.observed) for j in judged)),
        requests=None if history is None else _requests(history),
        deeds=None if history is None or not history.deeds else _deeds(history),
        timeline="" if history is None or not history.outcomes else timeline_svg(history),
        notes=()
        if result is None or result.cannot is None
        else (f"It could not be carried out here: {result.cannot}",),
    )


def _unjudged(drill: Drill) -> tuple[Judged, ...]:
    return tuple(Judged(promise.says, "unknown", UNJUDGED) for promise in (*GENERAL, *drill.promises))


def _target(drill: Drill, history: History | None) -> str:
    setup = drill.setup
    names = ", ".join(plan.name for plan in setup.workers)
    targets = dict.fromkeys(action.target for action in drill.actions() if action.target not in (None, "struck"))
    struck = ", ".join(str(target).replace("home:", "whoever served session ") for target in targets) or "no worker"
    if history is not None and "targets" in history.notes:
        confirmed = history.notes["targets"]
        listed = ", ".join(f"{name} is {identity}" for name, identity in confirmed.items())
        missing = history.notes.get("left_out", ())
        without = f" There are no more workers, so the drill went without {', '.join(missing)}." if missing else ""
        return f"Confirmed by hand in namespace `{history.notes['namespace']}`: {listed}. Struck: {struck}.{without}"
    return f"{len(setup.workers)} workers ({names}) behind one gateway with policy {setup.policy}. Struck: {struck}."


def _in_words(step: Step) -> str:
    match step:
        case Send(turns, blows):
            sent = f"send {len(turns)} requests"
            return sent + "".join(f"; after {at_s:g} s: {action}" for at_s, action in blows)
        case Do(action):
            return f"do: {action}"
        case Wait(seconds):
            return f"wait {seconds:g} s"
        case Settle(_, within_s):
            return f"wait until all workers are used, for at most {within_s:g} s"
        case Look(label, texts):
            return f"look: {label}" + (f" (claims and truth of {len(texts)} texts)" if texts else "")


def _requests(history: History) -> Table:
    rows = []
    for step in sorted({outcome.step for outcome in history.outcomes}):
        outcomes = history.of_step(step)
        endings = Counter(outcome.ending for outcome in outcomes)
        times = distribution([outcome.ttft_ms for outcome in outcomes if outcome.ttft_ms is not None])
        served = Counter(outcome.worker or "unknown" for outcome in outcomes)
        rows.append(
            (
                f"part {step + 1}",
                str(len(outcomes)),
                ", ".join(f"{count} {ending}" for ending, count in endings.most_common()),
                "unknown" if times.p50 is None else f"{times.p50:.1f} / {times.p95:.1f} ({times.count})",
                ", ".join(f"{worker} {count}" for worker, count in sorted(served.items())),
            )
        )
    return Table(("", "requests", "endings", "TTFT ms p50 / p95 (count)", "served by"), tuple(rows))


def _deeds(history: History) -> Table:
    rows = [(f"{deed.at_s:.2f} s", deed.action, deed.worker or "gateway", deed.life or "") for deed in history.deeds]
    return Table(("at", "what was done", "to", "life"), tuple(rows))


# --- forms -------------------------------------------------------------------------------------------------------


def markdown(page: Page) -> str:
    lines = [
        f"# {page.title}",
        "",
        f"`{page.name}`: **{page.verdict}**" + (f" ({page.label})" if page.label else ""),
        "",
    ]
    for heading, text in page.sections:
        lines += [f"## {heading}", "", text, ""]
    lines += ["## Steps", "", *(f"{number}. {step}" for number, step in enumerate(page.steps, 1)), ""]
    lines += ["## Acceptance", "", *_markdown_table(page.promises), ""]
    if page.requests is not None:
        lines += ["## Evidence", "", *_markdown_table(page.requests), ""]
    if page.deeds is not None:
        lines += [*_markdown_table(page.deeds), ""]
    lines += [f"- {note}" for note in page.notes]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(table: Table) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(table.header), "|" + "---|" * len(table.header), *map(line, table.rows)]


def html(page: Page) -> str:
    return Template((Path(__file__).parent / "runbook.html").read_text(encoding="utf-8")).substitute(
        title=escape(page.title),
        name=escape(page.name),
        verdict=escape(page.verdict),
        verdict_class=page.verdict if page.verdict in ("pass", "fail", "unknown") else "unknown",
        label=escape(page.label),
        sections="".join(f"<section><h2>{escape(h)}</h2><p>{escape(text)}</p></section>" for h, text in page.sections),
        steps="".join(f"<li>{escape(step)}</li>" for step in page.steps),
        promises=_promises_html(page.promises),
        timeline=page.timeline,
        requests="" if page.requests is None else page.requests.html(),
        deeds="" if page.deeds is None else page.deeds.html(),
        notes="".join(f"<p class='note'>{escape(note)}</p>" for note in page.notes),
    )


def _promises_html(table: Table) -> str:
    rows = "".join(
        f'<tr><td><span class="badge {escape(verdict)}">{escape(verdict)}</span></td>'
        f'<th scope="row">{escape(promise)}</th><td>{escape(observed)}</td></tr>'
        for promise, verdict, observed in table.rows
    )
    return f"<table class='promises'><tbody>{rows}</tbody></table>"


def write_pages(drill: Drill, result: DrillResult, out: Path) -> None:
    """NAME.md, NAME.html and NAME.json (result with its whole history) into `out`. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    page = page_of(drill, result)
    (out / f"{drill.name}.md").write_text(markdown(page), encoding="utf-8")
    (out / f"{drill.name}.html").write_text(html(page), encoding="utf-8")
    (out / f"{drill.name}.json").write_bytes(msgspec.json.encode(result) + b"\n")
