"""Rows as Alibaba Bailian published them for Qwen: a chat a line, with the chat that it continues.

`chat_id`, `parent_chat_id` (-1 for none), `timestamp`, `input_length`, `output_length`, `turn`, `hash_ids`; ids are
numbers or strings, and rows are cumulative. A chat that is continued twice branches: its first continuation goes on
with the session, every other one is a session of its own, as two requests of one session cannot run at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvrelay.core.traces.formats.global_ids import global_ids
from kvrelay.core.traces.formats.options import ImportOptions, Lines, TimeUnit, Written, empty_file
from kvrelay.core.traces.formats.rows import Id, Row, json_lines, trace_of
from kvrelay.core.traces.trace import NotTold, Trace, arrivals

LEGAL = "members chat_id, parent_chat_id, timestamp, input_length, output_length, hash_ids"
NO_PARENT: tuple[Id | None, ...] = (None, -1, "-1", "")


class _Row(msgspec.Struct):
    chat_id: Id
    timestamp: float
    input_length: int
    output_length: int
    parent_chat_id: Id | None = None
    hash_ids: tuple[Id, ...] | None = None


def looks_like(first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and b'"chat_id"' in first


def read(lines: Lines, options: ImportOptions = ImportOptions()) -> Trace:
    """Raises TraceError; NotTold when seconds and milliseconds cannot be told apart."""
    rows = list(json_lines(lines, _Row, LEGAL))
    if not rows:
        raise empty_file("one chat as a JSON object per line")
    unit, notices = _time_unit(rows, options.time_unit)
    factor = 1000.0 if unit == "s" else 1.0
    names = _sessions(rows, notices)
    flat = [
        Row(line, row.timestamp * factor, row.input_length, row.output_length, row.hash_ids, name)
        for (line, row), name in zip(rows, names, strict=True)
    ]
    return trace_of(flat, options, notices)


def write(trace: Trace) -> Written:
    """Times in seconds, as the published files have them."""
    numbers, notices = global_ids(trace)
    if any(turn.think_ms for session in trace.sessions for turn in session.turns):
        notices.append("Think times are lost: these rows say when a request was made, not how long after an answer.")
    notices.append("Names of sessions are lost: chats are numbered.")
    return Written(_rows(trace, numbers), tuple(notices))


def _rows(trace: Trace, numbers: dict[tuple[str, int], int]) -> Iterator[bytes]:
    last_chat: dict[str, tuple[int, int]] = {}  # session -> (chat, turn)
    for chat, arrival in enumerate(arrivals(trace)):
        session, turn = arrival.session, arrival.turn
        parent, number = last_chat.get(session.session_id, (-1, 0))
        last_chat[session.session_id] = chat, number + 1
        row: dict[str, object] = {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": round(arrival.at_ms / 1000, 7),
            "input_length": turn.input_tokens,
            "output_length": turn.output_tokens,
            "type": "text",
            "turn": number + 1,
        }
        if trace.block_size_tokens:
            row["hash_ids"] = [numbers[session.scope, block] for block in turn.block_ids]
        yield msgspec.json.encode(row)


def _time_unit(rows: list[tuple[int, _Row]], told: TimeUnit | None) -> tuple[TimeUnit, list[str]]:
    """Fractions say seconds: nobody writes fractions of a millisecond. Whole numbers may be either."""
    if told is not None:
        return told, []
    fractions = sum(not row.timestamp.is_integer() for _, row in rows)
    if not fractions:
        found = "timestamps without fractions, which may be seconds or milliseconds"
        raise NotTold(rows[0][0], found, "the unit told: `s` or `ms`", option="time_unit")
    return "s", [f"Timestamps are taken as seconds: {fractions} of {len(rows)} have a fraction."]


def _sessions(rows: list[tuple[int, _Row]], notices: list[str]) -> list[str]:
    """The name of each row's session: of its first chat."""
    session_of: dict[Id, str] = {}
    continued: set[Id] = set()
    names, orphans, branches = [], 0, 0
    for _, row in rows:
        parent = row.parent_chat_id
        name = f"chat-{row.chat_id}"
        if parent is not None and parent in session_of:
            if parent in continued:
                branches += 1
            else:
                name = session_of[parent]
                continued.add(parent)
        elif parent not in NO_PARENT:
            orphans += 1
        session_of[row.chat_id] = name
        names.append(name)
    if orphans:
        notices.append(f"{orphans} chats continue a chat that is not in the file before them: they begin a session.")
    if branches:
        notices.append(f"{branches} chats continue a chat that was continued already: they are sessions of their own.")
    return names
