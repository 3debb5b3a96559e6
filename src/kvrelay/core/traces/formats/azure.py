"""Azure LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`, nothing about content."""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.core.traces.formats.csv_rows import csv_rows, tokens
from kvrelay.core.traces.formats.options import ImportOptions, Lines, Written, empty_file
from kvrelay.core.traces.formats.rows import Row, trace_of
from kvrelay.core.traces.formats.times import format_time, parse_time_ms
from kvrelay.core.traces.trace import Trace, TraceError, arrivals

TIME, INPUT, OUTPUT = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def looks_like(first: bytes) -> bool:
    return b"ContextTokens" in first and b"GeneratedTokens" in first


def read(lines: Lines, options: ImportOptions = ImportOptions()) -> Trace:
    """Every row is a session of its own."""
    rows = []
    for line, row in csv_rows(lines, COLUMNS):
        at_ms = parse_time_ms(row[TIME])
        if at_ms is None:
            raise TraceError(line, f"`{TIME}` is `{row[TIME]}`", "a date and a time, as 2023-11-16 18:15:46.6805900")
        rows.append(Row(line, at_ms, tokens(line, row, INPUT), tokens(line, row, OUTPUT), None))
    if not rows:
        raise empty_file("one request per row below the header")
    return trace_of(rows, options)


def write(trace: Trace) -> Written:
    """Times and lengths only, on a day that never was."""
    said = "Block ids and sessions are lost: the format has times and lengths only."
    return Written(_lines(trace), (said, "Times are on 1 January 1970, as the trace has no date."))


def _lines(trace: Trace) -> Iterator[bytes]:
    yield ",".join(COLUMNS).encode()
    for arrival in arrivals(trace):
        turn = arrival.turn
        yield f"{format_time(arrival.at_ms)},{turn.input_tokens},{turn.output_tokens}".encode()
