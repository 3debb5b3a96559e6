"""TraceLab rounds: one model call of a coding agent a line, with what the provider's cache held of its prompt.

The rows have no block ids, but they say how many tokens of a round's prompt were there before (`prefix_tokens`). With a
block size told, ids are made from that: a round keeps its session's blocks as far as its prefix reaches, and the rest
is new. Without one, the trace is times and lengths.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from kvrelay.core.traces.formats.options import ImportOptions, Lines, empty_file
from kvrelay.core.traces.formats.rows import json_lines
from kvrelay.core.traces.formats.times import parse_time_ms
from kvrelay.core.traces.trace import NO_BLOCKS, NO_SCOPE, SESSION_SCOPE, Session, Trace, TraceError, Turn

LEGAL = "members session_id, round_index, input_tokens_total, prefix_tokens, output_tokens, timing_events"


INPUTS = ("user_message", "tool_result")


class _Event(msgspec.Struct):
    event_type: str
    timestamp: str


class _Round(msgspec.Struct):
    session_id: str
    round_index: int
    input_tokens_total: int
    prefix_tokens: int
    output_tokens: int
    timing_events: tuple[_Event, ...]


class _Timed(msgspec.Struct, frozen=True):
    """A round and when the model was asked and had answered.

    The events are the inputs of the round (the user's words, results of tools) and then what the model said; it can
    have been asked only after the last input.
    """

    round: _Round
    asked_ms: float
    ended_ms: float


def looks_like(first: bytes) -> bool:
    return b'"input_tokens_total"' in first and b'"prefix_tokens"' in first


def read(lines: Lines, options: ImportOptions = ImportOptions()) -> Trace:
    """Sessions in the order of the file."""
    by_session: dict[str, list[_Timed]] = defaultdict(list)
    for line, entry in json_lines(lines, _Round, LEGAL):
        by_session[entry.session_id].append(_timed(line, entry))
    for own in by_session.values():
        own.sort(key=lambda timed: timed.round.round_index)
    if not by_session:
        raise empty_file("one round as a JSON object per line")
    size = options.block_size_tokens or NO_BLOCKS
    starts = {name: own[0].asked_ms for name, own in by_session.items()}
    first_ms = min(starts.values())
    sessions = tuple(
        Session(name, name, _turns(own, size), round(starts[name] - first_ms, 3)) for name, own in by_session.items()
    )
    notices = ["Times are absolute dates: they are counted from the first request."]
    if size:
        notices.append(f"Block ids of {size} tokens are made from `prefix_tokens`; the file itself has none.")
    return Trace(size, SESSION_SCOPE if size else NO_SCOPE, sessions, tuple(notices))


def _timed(line: int, entry: _Round) -> _Timed:
    times = [(event.event_type, parse_time_ms(event.timestamp)) for event in entry.timing_events]
    known = [time for _, time in times if time is not None]
    if not known or len(known) < len(times):
        raise TraceError(line, "a round without readable `timing_events`", "events with ISO timestamps")
    inputs = [time for kind, time in times if kind in INPUTS and time is not None]
    return _Timed(entry, max(inputs, default=known[0]), known[-1])


def _turns(rounds: list[_Timed], size: int) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    ids: list[int] = []
    used = 0
    for before, timed in zip([None, *rounds], rounds, strict=False):
        total = timed.round.input_tokens_total
        if size:
            del ids[timed.round.prefix_tokens // size :]
            new = total // size - len(ids)
            ids += range(used, used + new)
            used += new
        think_ms = 0.0 if before is None else max(0.0, timed.asked_ms - before.ended_ms)
        due_ms = round(timed.asked_ms - rounds[0].asked_ms, 3)
        turns.append(Turn(due_ms, round(think_ms, 3), tuple(ids), total, timed.round.output_tokens))
    return tuple(turns)
