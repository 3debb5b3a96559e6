"""Our own format, which loses nothing: a header line, then one session a line."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvrelay.core.traces.formats.options import ImportOptions, Lines, Written
from kvrelay.core.traces.formats.rows import json_lines
from kvrelay.core.traces.trace import Session, Trace, TraceError

VERSION = 1
LEGAL = "a file written by `kvrelay trace convert --to kvrelay`"


class _Header(msgspec.Struct):
    kvrelay_trace: int
    block_size_tokens: int
    hash_scope: str
    notices: tuple[str, ...] = ()
    label: str = ""


def looks_like(first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and b'"kvrelay_trace"' in first


def read(lines: Lines, options: ImportOptions = ImportOptions()) -> Trace:
    """Raises TraceError for a version that we do not know."""
    iterator = iter(lines)
    header = next((one for _, one in json_lines([next(iterator, b"")], _Header, LEGAL)), None)
    if header is None or header.kvrelay_trace != VERSION:
        found = "no header" if header is None else f"version {header.kvrelay_trace}"
        raise TraceError(1, found, f"version {VERSION}, {LEGAL}")
    sessions = []
    for number, session in json_lines(iterator, Session, LEGAL):
        if not session.turns:
            raise TraceError(number + 1, f"session `{session.session_id}` without turns", LEGAL)
        sessions.append(session)
    return Trace(header.block_size_tokens, header.hash_scope, tuple(sessions), header.notices, header.label)


def write(trace: Trace) -> Written:
    return Written(_lines(trace))


def _lines(trace: Trace) -> Iterator[bytes]:
    header = _Header(VERSION, trace.block_size_tokens, trace.hash_scope, trace.notices, trace.label)
    yield msgspec.json.encode(header)
    for session in trace.sessions:
        yield msgspec.json.encode(session)
