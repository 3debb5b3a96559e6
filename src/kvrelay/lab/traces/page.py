"""The facts of a trace as one HTML file that needs nothing else: no script, no request, about 60 KB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from string import Template

from kvrelay.core.stats.distribution import Distribution
from kvrelay.core.traces.facts import EndlessCache, Examined, TraceFacts
from kvrelay.lab.replay.trace_file import TraceFile
from kvrelay.lab.traces.charts import Figure, figures
from kvrelay.lab.traces.svg import duration

NOT_KNOWN = "unavailable"


def trace_page(source: TraceFile, examined: Examined) -> str:
    facts = examined.facts
    notes = [*facts.notices, *facts.limitations] or ["The file was read as it is."]
    return Template(_text("page.html")).substitute(
        name=escape(source.name),
        kind=escape(_kind(source, facts)),
        style=_text("page.css"),
        figures="".join(
            f"<div><b>{escape(value)}</b><span>{escape(of)}</span></div>" for value, of in _headline(facts)
        ),
        charts="".join(_figure(figure) for figure in figures(source.trace, examined)),
        reuse=_reuse_table(facts.endless_cache),
        lengths=_lengths_table(facts),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
    )


def _kind(source: TraceFile, facts: TraceFacts) -> str:
    size = (
        f"blocks of {facts.block_size_tokens} tokens, ids {facts.hash_scope}"
        if facts.block_size_tokens
        else "no block ids"
    )
    label = f" · {facts.label}" if facts.label else ""
    return f"{source.format} · {size}{label} · sha256 {source.sha256}"


def _figure_of(value: str, meaning: str) -> str:
    return f"<div><b>{escape(value)}</b><span>{escape(meaning)}</span></div>"


def _headline(facts: TraceFacts) -> list[tuple[str, str]]:
    agents = f" and {facts.sub_agents} sub-agents" if facts.sub_agents else ""
    sessions = f"{facts.sessions:,}", f"sessions{agents}"
    if facts.derived_sessions is not None:
        sessions = f"{facts.derived_sessions:,}", "sessions, derived from shared blocks"
    shown = [
        (f"{facts.requests:,}", "requests"),
        sessions,
        (duration(facts.span_ms), "from the first request to the last"),
        (_words(facts.lengths.input_tokens.p50), "input tokens, median"),
        (_words(facts.lengths.output_tokens.p50), "output tokens, median"),
    ]
    for cache in facts.endless_cache[-1:]:
        shown.insert(
            0, (_percent(cache.token_hit), f"of input tokens hit with an endless cache ({cache.tail_rule_means})")
        )
    return shown


def _figure(figure: Figure) -> str:
    """The reading holds our own markup (names of lines in their colour) and no text of the trace."""
    return f"<figure><h3>{escape(figure.title)}</h3><figcaption>{figure.reading}</figcaption>{figure.svg}</figure>"


def _reuse_table(caches: Sequence[EndlessCache]) -> str:
    if not caches:
        return "<p>Not known: the trace has no block ids.</p>"
    rows = [["Tail rule", *(cache.tail_rule for cache in caches)]]
    rows.append(["What counts", *(cache.tail_rule_means for cache in caches)])
    members: list[tuple[str, Callable[[EndlessCache], str]]] = [
        ("Blocks", lambda cache: f"{cache.blocks:,}"),
        ("Hit blocks", lambda cache: f"{cache.hit_blocks:,}"),
        ("Hit blocks / all blocks", lambda cache: _percent(cache.block_hit)),
        ("Input tokens", lambda cache: f"{cache.tokens:,}"),
        ("Hit tokens", lambda cache: f"{cache.hit_tokens:,}"),
        ("Hit tokens / all input tokens", lambda cache: _percent(cache.token_hit)),
        ("The same, later half of the requests", lambda cache: _percent(cache.token_hit_second_half)),
    ]
    rows += [[name, *(member(cache) for cache in caches)] for name, member in members]
    return _table(rows)


def _lengths_table(facts: TraceFacts) -> str:
    lengths = facts.lengths
    rows = [["", "count", "p50", "p95", "p99", "mean", "largest"]]
    rows.append(["Input tokens", *_row(lengths.input_tokens, _words)])
    rows.append(["Output tokens", *_row(lengths.output_tokens, _words)])
    rows.append(["Turns of a session", *_row(lengths.turns, _words)])
    if lengths.think_ms.count:
        rows.append(["Pause before a turn", *_row(lengths.think_ms, _time)])
        rows.append(["First to last request of a session", *_row(lengths.session_span_ms, _time)])
    return _table(rows)


def _row(found: Distribution, word: Callable[[float | None], str]) -> list[str]:
    return [f"{found.count:,}", *(word(value) for value in (found.p50, found.p95, found.p99, found.mean, found.max))]


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = (
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in body
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _percent(share: float | None) -> str:
    return NOT_KNOWN if share is None else f"{share:.2%}"


def _words(count: float | None) -> str:
    return NOT_KNOWN if count is None else f"{count:,.0f}"


def _time(ms: float | None) -> str:
    return NOT_KNOWN if ms is None else duration(ms)


def _text(name: str) -> str:
    return (resources.files("kvrelay.lab.traces") / name).read_text(encoding="utf-8")
