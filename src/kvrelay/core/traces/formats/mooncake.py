"""Mooncake rows: one request a line with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

Two kinds of rows share these members. *Cumulative* rows hold the whole context of a request; rows with a `session_id`
are turns of that session, and without one every row is a session of its own. *Delta* rows, as AIPerf's multi-turn
traces have them, hold only the new tokens of a turn (usually with a `delay` after the answer before): see `delta.py`.
Read as the other kind, a trace would show reuse that never was, or none where there is much, so which it is must follow
from the ids or be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvrelay.core.traces.formats.delta import DeltaRow, accumulated
from kvrelay.core.traces.formats.global_ids import global_ids
from kvrelay.core.traces.formats.options import ImportOptions, Lines, Written, empty_file
from kvrelay.core.traces.formats.rows import Id, Row, json_lines, trace_of
from kvrelay.core.traces.trace import NotTold, Trace, TraceError, arrivals

LEGAL = "members timestamp, input_length, output_length, hash_ids"


class _Row(msgspec.Struct):
    timestamp: float | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: tuple[Id, ...] | None = None
    session_id: str | int | None = None
    delay: float | None = None
    text_input: Any = None
    messages: Any = None
    payload: Any = None

    def text_member(self) -> str | None:
        """Some tools put prompts into these rows. A trace is passed on between companies because it has none."""
        return next((name for name in ("text_input", "messages", "payload") if getattr(self, name) is not None), None)


def looks_like(first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and (b'"input_length"' in first or b'"hash_ids"' in first)


def read(lines: Lines, options: ImportOptions = ImportOptions()) -> Trace:
    """Raises TraceError; NotTold when the kind of the rows or their block size does not follow from the file."""
    rows = list(_complete(json_lines(lines, _Row, LEGAL)))
    if not rows:
        raise empty_file("one request as a JSON object per line")
    kind, why = (options.rows, "as told") if options.rows is not None else _kind(rows)
    if kind == "delta":
        notice = f"Rows hold only the new tokens of a turn ({why}): contexts are added up with the answers in between."
        return accumulated([_delta(line, row) for line, row in rows], options, [notice])
    notices = [f"Rows of a session hold its whole context ({why})."] if kind == "cumulative" and why else []
    return trace_of([_cumulative(line, row) for line, row in rows], options, notices)


def write(trace: Trace) -> Written:
    """Cumulative rows in the order of their times. Session-local ids become ids of the whole file."""
    numbers, notices = global_ids(trace)
    if any(turn.think_ms for session in trace.sessions for turn in session.turns):
        notices.append("Think times are lost: these rows say when a request was made, not how long after an answer.")
    if any(session.parent_id for session in trace.sessions):
        notices.append("Which session started which sub-agent is lost; both keep their names.")
    return Written(_rows(trace, numbers), tuple(notices))


def _rows(trace: Trace, numbers: dict[tuple[str, int], int]) -> Iterator[bytes]:
    for arrival in arrivals(trace):
        session, turn = arrival.session, arrival.turn
        row: dict[str, object] = {}
        if len(session.turns) > 1 or not session.session_id.startswith("row-"):
            row["session_id"] = session.session_id
        row |= {"timestamp": round(arrival.at_ms, 4), "input_length": turn.input_tokens}
        row["output_length"] = turn.output_tokens
        if trace.block_size_tokens:
            row["hash_ids"] = [numbers[session.scope, block] for block in turn.block_ids]
        yield msgspec.json.encode(row)


def _complete(rows: Iterable[tuple[int, _Row]]) -> Iterator[tuple[int, _Row]]:
    for line, row in rows:
        text = row.text_member()
        if text is not None:
            raise TraceError(
                line, f"a member `{text}` with text", "rows with ids only; logged requests are a format too"
            )
        if row.input_length is None or row.output_length is None:
            raise TraceError(line, "no `input_length` or no `output_length`", LEGAL)
        if row.timestamp is None and (row.session_id is None or row.delay is None):
            raise TraceError(line, "no `timestamp`", "a `timestamp`, or the `delay` of a later row of a session")
        yield line, row


def _kind(rows: list[tuple[int, _Row]]) -> tuple[str, str]:
    """What the ids say: whether a later row of a session begins like the row before it."""
    before: dict[str | int, _Row] = {}
    alike = different = 0
    for _, row in rows:
        if row.session_id is None:
            continue
        last = before.get(row.session_id)
        if last is not None and last.hash_ids and row.hash_ids:
            alike += last.hash_ids[0] == row.hash_ids[0]
            different += last.hash_ids[0] != row.hash_ids[0]
        before[row.session_id] = row
    turns = sum(row.session_id is not None for _, row in rows) - len(before)
    if not turns:
        return "cumulative", ""
    if alike and not different:
        return "cumulative", f"each of {alike} later rows begins like the one before it"
    if different and not alike:
        return "delta", f"none of {different} later rows begins like the one before it"
    found = f"{turns} later rows of sessions: {alike} begin like the row before them, {different} do not"
    line = next(line for line, row in rows if row.session_id is not None)
    legal = "whether they are `cumulative` (the whole context) or `delta` (only the new tokens)"
    raise NotTold(line, found, legal, option="rows")


def _cumulative(line: int, row: _Row) -> Row:
    if row.timestamp is None:
        raise TraceError(line, "no `timestamp`", "cumulative rows, each with a `timestamp`")
    name = None if row.session_id is None else str(row.session_id)
    return Row(line, row.timestamp, row.input_length or 0, row.output_length or 0, row.hash_ids, name)


def _delta(line: int, row: _Row) -> DeltaRow:
    name = f"row-{line}" if row.session_id is None else str(row.session_id)
    return DeltaRow(line, name, row.timestamp, row.delay, row.input_length or 0, row.output_length or 0, row.hash_ids)
