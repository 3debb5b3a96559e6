"""WEKA agent sessions: one JSON object a line per session, as kv-cache-tester publishes them.

A `subagent` entry holds a list of requests of its own. It becomes a session of its own that starts at the entry's time;
its ids live in its parent's scope (sub-agents of one parent share their tool list and system prompt). Its requests
run beside the parent's next turns, as they did when the trace was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvrelay.core.traces.formats.options import CannotExpress, ImportOptions, Lines, Written, empty_file
from kvrelay.core.traces.trace import GLOBAL_SCOPE, SESSION_SCOPE, Session, Trace, TraceError, Turn

# Traces are shared between companies because they hold no text; a file that has some is refused rather than read.
TEXT_MEMBERS = frozenset({"prompt", "messages", "content", "text", "response", "completion"})

UNKNOWN = "unknown"  # members that other readers of the format insist on


class _Entry(msgspec.Struct):
    t: float
    type: str
    input_tokens: int | None = msgspec.field(name="in", default=None)
    output_tokens: int | None = msgspec.field(name="out", default=None)
    hash_ids: tuple[int, ...] | None = None
    api_time: float | None = None
    think_time: float | None = None
    agent_id: str | None = None
    requests: tuple[_Entry, ...] | None = None


class _Line(msgspec.Struct):
    id: str
    block_size: int
    requests: tuple[_Entry, ...]
    hash_id_scope: str = "local"


def looks_like(first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and b'"requests"' in first


def read(lines: Lines, options: ImportOptions = ImportOptions()) -> Trace:
    """Sessions carry no absolute times, so session k of the file starts at k x `session_gap_ms`."""
    sessions: list[Session] = []
    block_size_tokens, hash_scope = None, SESSION_SCOPE
    for position, (number, record) in enumerate(_decode(lines)):
        if block_size_tokens not in (None, record.block_size):
            raise TraceError(
                number, f"block_size {record.block_size}", f"one file has one block size, {block_size_tokens}"
            )
        block_size_tokens = record.block_size
        hash_scope = SESSION_SCOPE if record.hash_id_scope == "local" else GLOBAL_SCOPE
        sessions += _sessions(number, record, position * options.session_gap_ms)
    if block_size_tokens is None:
        raise empty_file("one session as a JSON object per line")
    if options.block_size_tokens not in (None, block_size_tokens):
        found = f"block size {options.block_size_tokens} was told"
        raise TraceError(1, found, f"what the file itself says, {block_size_tokens}")
    gap_s = options.session_gap_ms / 1000
    notice = f"Sessions have no times of their own: the next one of the file starts {gap_s:g} s after the one before."
    return Trace(block_size_tokens, hash_scope, tuple(sessions), (notice,))


def write(trace: Trace) -> Written:
    """Sessions with their sub-agents. Raises CannotExpress for a trace without block ids."""
    if not trace.block_size_tokens:
        raise CannotExpress("agent sessions are made of block ids, and this trace has none")
    notices = ["When sessions started is lost: the format has no times for them."]
    return Written(_lines(trace), tuple(notices))


def _lines(trace: Trace) -> Iterator[bytes]:
    children: dict[str, list[Session]] = {}
    for session in trace.sessions:
        if session.parent_id is not None:
            children.setdefault(session.parent_id, []).append(session)
    known = {session.session_id for session in trace.sessions}
    scope = "local" if trace.hash_scope == SESSION_SCOPE else "global"
    for session in trace.sessions:
        if session.parent_id is not None and session.parent_id in known:
            continue
        entries = [_entry_of(turn) for turn in session.turns]
        entries += [_sub_agent_of(child, session) for child in children.get(session.session_id, ())]
        line = {"id": session.session_id, "models": [UNKNOWN], "block_size": trace.block_size_tokens}
        # Other readers take the entries as they come; the parent's own stay before a sub-agent of the same moment.
        ordered = sorted(entries, key=lambda entry: entry["t"])
        yield msgspec.json.encode({**line, "hash_id_scope": scope, "requests": ordered})


def _sub_agent_of(child: Session, parent: Session) -> dict[str, Any]:
    return {
        "t": _seconds(child.start_ms - parent.start_ms),
        "type": "subagent",
        "agent_id": child.session_id.removeprefix(f"{parent.session_id}/"),
        "subagent_type": UNKNOWN,
        "status": UNKNOWN,
        "models": [UNKNOWN],
        "requests": [_entry_of(turn) for turn in child.turns],
    }


def _entry_of(turn: Turn) -> dict[str, Any]:
    return {
        "t": _seconds(turn.due_ms),
        "type": "n",
        "model": UNKNOWN,
        "in": turn.input_tokens,
        "out": turn.output_tokens,
        "hash_ids": turn.block_ids,
        "think_time": _seconds(turn.think_ms),
    }


def _seconds(ms: float) -> float:
    return round(ms / 1000, 7)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)


def _decode(lines: Iterable[bytes]) -> Iterator[tuple[int, _Line]]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        _refuse_text(number, line)
        try:
            yield number, decoder.decode(line)
        except msgspec.ValidationError as problem:
            raise TraceError(
                number, str(problem), "members id, block_size, requests[t, type, in, out, hash_ids]"
            ) from (problem)
        except msgspec.DecodeError as problem:
            raise TraceError(number, f"not JSON ({problem})", "one session as a JSON object per line") from problem


def _refuse_text(number: int, line: bytes) -> None:
    found = sorted(name for name in TEXT_MEMBERS if b'"%s":' % name.encode() in line)
    if found:
        raise TraceError(number, f"a member `{found[0]}` with text", "traces with block ids only, no prompt text")


def _sessions(number: int, record: _Line, start_ms: float) -> list[Session]:
    scope = record.id if record.hash_id_scope == "local" else ""
    own = [entry for entry in record.requests if entry.requests is None]
    sessions = [Session(record.id, scope, _turns(number, own), start_ms)] if own else []
    for entry in record.requests:
        if entry.requests is not None:
            name = f"{record.id}/{entry.agent_id or f'agent_{len(sessions):03d}'}"
            turns = _turns(number, entry.requests)
            sessions.append(Session(name, scope, turns, start_ms + _ms(entry.t), parent_id=record.id))
    return sessions


def _turns(number: int, entries: Iterable[_Entry]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    before: _Entry | None = None
    for entry in entries:
        if entry.input_tokens is None or entry.output_tokens is None or entry.hash_ids is None:
            raise TraceError(number, f"a request at t={entry.t} without in, out or hash_ids", "all three are needed")
        turns.append(
            Turn(_ms(entry.t), _think_ms(entry, before), entry.hash_ids, entry.input_tokens, entry.output_tokens)
        )
        before = entry
    return tuple(turns)


def _think_ms(entry: _Entry, before: _Entry | None) -> float:
    """What the trace says, or else the time since the previous answer was there."""
    if before is None:
        return 0.0
    if entry.think_time is not None:
        return _ms(entry.think_time)
    return max(0.0, _ms(entry.t - before.t - (before.api_time or 0.0)))
