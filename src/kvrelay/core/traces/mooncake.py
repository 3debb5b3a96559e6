"""Importer of Mooncake-style traces: one request a line with `timestamp`, `input_length`, `output_length`, `hash_ids`.

Rows are cumulative here, and the ids are valid for the whole file. The same members are also used for *delta* rows
(with a `delay`; each row only the new tokens of a turn); read as cumulative they would look like a trace without any
reuse, so they are refused by name. Rows with a `session_id` are turns of that session; without one, every row is a
session of its own.

No row says its block size. It follows from all rows together: each lists the full blocks of its input, with or without
the partial last one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvrelay.core.traces.trace import GLOBAL_SCOPE, Session, Trace, TraceError, Turn

# The published size first; where several fit all rows (short prompts only), the first one is taken.
BLOCK_SIZES_TOKENS = (512, 16, 32, 64, 128, 256, 1024, 2048)


class _Row(msgspec.Struct):
    timestamp: float | None = None
    input_length: int = 0
    output_length: int = 0
    hash_ids: tuple[int, ...] | None = None
    session_id: str | None = None
    delay: float | None = None


def read_mooncake(lines: Iterable[bytes]) -> Trace:
    """Sessions in the order of their first rows."""
    sizes = list(BLOCK_SIZES_TOKENS)
    starts_ms: dict[str, float] = {}
    turns: dict[str, list[Turn]] = {}
    for number, row in _decode(lines):
        if row.timestamp is None or row.hash_ids is None:
            raise TraceError(number, "no `timestamp` or no `hash_ids`", "both are needed to replay a row")
        sizes = _narrowed(number, sizes, row.input_length, len(row.hash_ids))
        name = row.session_id if row.session_id is not None else f"row-{number}"
        due_ms = row.timestamp - starts_ms.setdefault(name, row.timestamp)
        turns.setdefault(name, []).append(Turn(due_ms, 0.0, row.hash_ids, row.input_length, row.output_length))
    if not turns:
        raise TraceError(1, "an empty file", "one request as a JSON object per line")
    sessions = tuple(Session(name, "", tuple(own), starts_ms[name]) for name, own in turns.items())
    return Trace(sizes[0], GLOBAL_SCOPE, sessions)


def _decode(lines: Iterable[bytes]) -> Iterable[tuple[int, _Row]]:
    decoder = msgspec.json.Decoder(_Row)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as problem:
            legal = "members timestamp, input_length, output_length, hash_ids"
            raise TraceError(number, str(problem), legal) from problem
        if row.delay is not None:
            legal = "cumulative rows, each with the whole context and a `timestamp`"
            raise TraceError(number, "`delay`: a row that holds only the new tokens of a turn", legal)
        yield number, row


def _narrowed(number: int, sizes: list[int], input_tokens: int, blocks: int) -> list[int]:
    """Those of `sizes` that this row fits as well."""
    fitting = [size for size in sizes if blocks in (input_tokens // size, -(-input_tokens // size))]
    if not fitting:
        raise TraceError(
            number,
            f"{blocks} hash_ids for input_length {input_tokens}",
            f"the number of blocks of one size for all rows; the rows before fit {', '.join(map(str, sizes))} tokens",
        )
    return fitting
