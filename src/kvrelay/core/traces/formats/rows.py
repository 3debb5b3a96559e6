"""Flat rows, one request each, and how they become sessions on one clock. Shared by the formats that have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec
from msgspec import Struct

from kvrelay.core.traces.formats.block_size import Listed, block_size_of
from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.synth import MAX_BLOCK_IDS
from kvrelay.core.traces.trace import GLOBAL_SCOPE, NO_BLOCKS, NO_SCOPE, Session, Trace, TraceError, Turn

Id = int | str
Line = TypeVar("Line")


class Row(Struct, frozen=True):
    """One request with its whole context. `at_ms` is on the file's clock, whatever that is."""

    line: int
    at_ms: float
    input_tokens: int
    output_tokens: int
    ids: tuple[Id, ...] | None
    session: str | None = None  # None: a session of its own
    think_ms: float = 0.0


def json_lines(lines: Iterable[bytes], kind: type[Line], legal: str) -> Iterator[tuple[int, Line]]:
    """Numbered from 1, blank lines left out. Raises TraceError; what it says never quotes the line."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except msgspec.ValidationError as problem:
            raise TraceError(number, str(problem), legal) from problem
        except msgspec.DecodeError as problem:
            raise TraceError(number, f"not JSON ({problem})", legal) from problem


def trace_of(rows: Sequence[Row], options: ImportOptions, notices: Sequence[str] = ()) -> Trace:
    """Sessions in the order of their first requests; ids of one numbering for the whole file."""
    for row in rows:
        if row.input_tokens < 0 or row.output_tokens < 0:
            raise TraceError(row.line, "a negative length", "input and output in tokens, 0 or more")
    said = list(notices)
    size = NO_BLOCKS
    if any(row.ids is not None for row in rows):
        listed = [Listed(row.line, row.input_tokens, len(row.ids)) for row in rows if row.ids is not None]
        block_size = block_size_of(listed, options.block_size_tokens)
        size = block_size.tokens
        said += block_size.notices
        said += _without_ids(rows)
    rows, said = in_order_from_zero(rows, said)
    numbered, more = _numbered(rows, size)
    sessions = _sessions(rows, numbered)
    return Trace(size, GLOBAL_SCOPE if size else NO_SCOPE, sessions, (*said, *more))


def in_order_from_zero(rows: Sequence[Row], notices: list[str]) -> tuple[list[Row], list[str]]:
    """The clock starts with the first request. Rows out of order are sorted; equal times stay as they were."""
    said = list(notices)
    late = sum(after.at_ms < before.at_ms for before, after in pairwise(rows))
    ordered = sorted(rows, key=lambda row: row.at_ms)
    if late:
        said.append(f"{late} rows are earlier than the row before them: all rows are sorted by time.")
    first_ms = ordered[0].at_ms if ordered else 0.0
    if first_ms:
        said.append(f"Times begin at {first_ms:.0f} ms on the file's clock: they are counted from the first request.")
    shifted = [msgspec.structs.replace(row, at_ms=round(row.at_ms - first_ms, 3)) for row in ordered]
    return shifted, said


def _without_ids(rows: Sequence[Row]) -> list[str]:
    bare = sum(row.ids is None for row in rows)
    return [f"{bare} of {len(rows)} rows have no ids: their prompts share nothing."] if bare else []


def _numbered(rows: Sequence[Row], size: int) -> tuple[list[tuple[int, ...]], list[str]]:
    """Ids as small integers. They are kept as they are if they are that already."""
    wanted = [(row.ids or ())[: -(-row.input_tokens // size)] if size else () for row in rows]
    if all(type(i) is int and 0 <= i < MAX_BLOCK_IDS for ids in wanted for i in ids):
        return wanted, []  # type: ignore[return-value]
    numbers: dict[Id, int] = {}
    numbered = [tuple(numbers.setdefault(i, len(numbers)) for i in ids) for ids in wanted]
    return numbered, [f"{len(numbers)} different ids are renumbered from 0, in the order in which they appear."]


def _sessions(rows: Sequence[Row], numbered: Sequence[tuple[int, ...]]) -> tuple[Session, ...]:
    turns: dict[str, list[Turn]] = defaultdict(list)
    starts_ms: dict[str, float] = {}
    for row, ids in zip(rows, numbered, strict=True):
        name = row.session if row.session is not None else f"row-{row.line}"
        due_ms = round(row.at_ms - starts_ms.setdefault(name, row.at_ms), 3)
        turns[name].append(Turn(due_ms, row.think_ms, ids, row.input_tokens, row.output_tokens))
    return tuple(Session(name, "", tuple(own), starts_ms[name]) for name, own in turns.items())
