"""BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, times in seconds.

Later releases have a `Session ID`. A row with 0 response tokens is a request that failed.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.core.traces.formats.csv_rows import csv_rows, tokens
from kvrelay.core.traces.formats.options import ImportOptions, Lines, Written, empty_file
from kvrelay.core.traces.formats.rows import Row, trace_of
from kvrelay.core.traces.trace import Trace, TraceError, arrivals

TIME, INPUT, OUTPUT = COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
SESSION = "Session ID"


def looks_like(first: bytes) -> bool:
    return b"Request tokens" in first and b"Response tokens" in first


def read(lines: Lines, options: ImportOptions = ImportOptions()) -> Trace:
    """Rows of one session are its turns; without a session id every row is a session of its own."""
    rows = []
    for line, row in csv_rows(lines, COLUMNS):
        try:
            at_ms = float(row[TIME]) * 1000
        except ValueError:
            raise TraceError(line, f"`{TIME}` is `{row[TIME]}`", "seconds since the start of the trace") from None
        session = row.get(SESSION) or None
        rows.append(Row(line, at_ms, tokens(line, row, INPUT), tokens(line, row, OUTPUT), None, session))
    if not rows:
        raise empty_file("one request per row below the header")
    failed = sum(row.output_tokens == 0 for row in rows)
    notices = [f"{failed} rows have no response tokens (requests that failed then): they are kept."] if failed else []
    return trace_of(rows, options, notices)


def write(trace: Trace) -> Written:
    """Times, lengths and sessions; the model's name is not known."""
    said = "Block ids and think times are lost: the format has times, lengths and sessions only."
    return Written(_lines(trace), (said,))


def _lines(trace: Trace) -> Iterator[bytes]:
    yield b"Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type"
    for arrival in arrivals(trace):
        turn = arrival.turn
        kind = "Conversation log" if len(arrival.session.turns) > 1 else "API log"
        session = arrival.session.session_id if len(arrival.session.turns) > 1 else ""
        total = turn.input_tokens + turn.output_tokens
        at_s = round(arrival.at_ms / 1000, 7)
        yield f"{at_s},{session},unknown,{turn.input_tokens},{turn.output_tokens},{total},{kind}".encode()
