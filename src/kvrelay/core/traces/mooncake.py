"""Importer of Mooncake traces: one request a line with `timestamp`, `input_length`, `output_length`, `hash_ids`.

Rows are cumulative here. The same members are also used for *delta* rows (a `session_id` with a `delay`, each row only
the new tokens); read as cumulative they would look like a trace without any reuse, so they are refused by name.
There is no session in the rows: every request is a session of one turn, and the ids are valid for the whole file.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvrelay.core.traces.trace import GLOBAL_SCOPE, Session, Trace, TraceError, Turn

DEFAULT_BLOCK_SIZE_TOKENS = 512


class _Row(msgspec.Struct):
    timestamp: float | None = None
    input_length: int = 0
    output_length: int = 0
    hash_ids: tuple[int, ...] | None = None
    session_id: str | None = None
    delay: float | None = None


def read_mooncake(lines: Iterable[bytes], *, block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS) -> Trace:
    """Every row must list ceil(input_length / block size) ids: that is how a wrong block size is noticed."""
    decoder = msgspec.json.Decoder(_Row)
    sessions: list[Session] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as problem:
            legal = "members timestamp, input_length, output_length, hash_ids"
            raise TraceError(number, str(problem), legal) from problem
        sessions.append(_session(number, row, block_size_tokens))
    if not sessions:
        raise TraceError(1, "an empty file", "one request as a JSON object per line")
    return Trace(block_size_tokens, GLOBAL_SCOPE, tuple(sessions))


def _session(number: int, row: _Row, block_size_tokens: int) -> Session:
    if row.session_id is not None or row.delay is not None:
        raise TraceError(number, "`session_id` or `delay`: rows that hold only new tokens", "cumulative rows")
    if row.timestamp is None or row.hash_ids is None:
        raise TraceError(number, "no `timestamp` or no `hash_ids`", "both are needed to replay a row")
    expected = -(-row.input_length // block_size_tokens)
    if len(row.hash_ids) != expected:
        raise TraceError(
            number,
            f"{len(row.hash_ids)} hash_ids for input_length {row.input_length}",
            f"{expected} at a block size of {block_size_tokens} tokens (another block size?)",
        )
    turn = Turn(0.0, 0.0, row.hash_ids, row.input_length, row.output_length)
    return Session(f"row-{number}", "", (turn,), start_ms=row.timestamp)
