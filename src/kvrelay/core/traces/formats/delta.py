"""Turns of which only the new tokens are known: the context is everything before, with the answers in between.

Blocks realign. A turn of 700 tokens and an answer of 100 end in the middle of a block, so the next turn's ids name
pieces that lie across blocks of the context. Only the full blocks of a session's first row keep their ids; what follows
contains an answer of this session, is shared with nobody else, and gets ids of its own, which the later turns keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from kvrelay.core.traces.formats.block_size import Listed, block_size_of
from kvrelay.core.traces.formats.global_ids import global_ids
from kvrelay.core.traces.formats.options import CannotExpress, ImportOptions, Written
from kvrelay.core.traces.formats.rows import Id, Row, in_order_from_zero
from kvrelay.core.traces.trace import GLOBAL_SCOPE, NotTold, Session, Trace, TraceError, Turn


class DeltaRow(Struct, frozen=True):
    """Only the new tokens of a turn. The first row of a session has a time, the others a delay after the answer."""

    line: int
    session: str
    at_ms: float | None
    delay_ms: float | None
    new_tokens: int
    output_tokens: int
    ids: tuple[Id, ...] | None


def accumulated(rows: Sequence[DeltaRow], options: ImportOptions, notices: Sequence[str]) -> Trace:
    """Sessions in the order of their first times, with whole contexts."""
    size, size_notices = _block_size(rows, options)
    firsts, later = _by_session(rows)
    starts, said = in_order_from_zero(firsts, [*notices, *size_notices])
    fresh = _Fresh(rows)
    sessions = []
    for first in starts:
        assert first.session is not None
        turns = tuple(_turns(first, later[first.session], size, fresh))
        sessions.append(Session(first.session, "", turns, first.at_ms))
    return Trace(size, GLOBAL_SCOPE, tuple(sessions), tuple(said))


def write(trace: Trace) -> Written:
    """AIPerf's multi-turn rows. Raises CannotExpress for a turn that does not continue the one before it."""
    numbers, notices = global_ids(trace)
    if not trace.block_size_tokens:
        raise CannotExpress("a trace without block ids has no multi-turn form")
    for session in trace.sessions:
        _refuse_breaks(session, trace.block_size_tokens)
    if any(session.parent_id for session in trace.sessions):
        notices.append("Which session started which sub-agent is lost; both keep their names.")
    notices.append("Later turns are only their new tokens; the tool that replays them adds the history.")
    return Written(_rows(trace, numbers), tuple(notices))


def _block_size(rows: Sequence[DeltaRow], options: ImportOptions) -> tuple[int, Sequence[str]]:
    listed = [Listed(row.line, row.new_tokens, len(row.ids)) for row in rows if row.ids is not None]
    if not listed and options.block_size_tokens is None:
        raise NotTold(rows[0].line, "rows without ids", "the block size told", option="block_size")
    found = block_size_of(listed, options.block_size_tokens)
    return found.tokens, found.notices


def _by_session(rows: Sequence[DeltaRow]) -> tuple[list[Row], dict[str, list[DeltaRow]]]:
    firsts: dict[str, Row] = {}
    later: dict[str, list[DeltaRow]] = {}
    for row in rows:
        if row.session in firsts:
            if row.delay_ms is None and row.at_ms is None:
                raise TraceError(row.line, "no `delay` and no `timestamp`", "one of them on every row")
            later[row.session].append(row)
            continue
        if row.at_ms is None:
            legal = "a `timestamp` on the first row of a session"
            raise TraceError(row.line, f"session `{row.session}` begins without a `timestamp`", legal)
        firsts[row.session] = Row(row.line, row.at_ms, row.new_tokens, row.output_tokens, row.ids, row.session)
        later[row.session] = []
    return list(firsts.values()), later


class _Fresh:
    """Numbers for blocks of first rows (as in the file if they are numbers) and new ones for all others."""

    def __init__(self, rows: Sequence[DeltaRow]) -> None:
        listed = [i for row in rows for i in row.ids or ()]
        self._as_numbers = all(type(i) is int and i >= 0 for i in listed)
        self._numbers: dict[Id, int] = {}
        self._next = max((int(i) for i in listed), default=-1) + 1 if self._as_numbers else 0

    def known(self, block: Id) -> int:
        if self._as_numbers:
            return int(block)
        if block not in self._numbers:
            self._numbers[block] = self.new()
        return self._numbers[block]

    def new(self) -> int:
        self._next += 1
        return self._next - 1


def _turns(first: Row, later: Sequence[DeltaRow], size: int, fresh: _Fresh) -> Iterator[Turn]:
    ids = [fresh.known(block) for block in first.ids or ()][: -(-first.input_tokens // size)]
    yield Turn(0.0, 0.0, tuple(ids), first.input_tokens, first.output_tokens)
    del ids[first.input_tokens // size :]  # the partial last block goes on with the answer
    context, due_ms = first.input_tokens + first.output_tokens, 0.0
    for row in later:
        delay_ms = row.delay_ms or 0.0
        due_ms += delay_ms
        if row.delay_ms is None and row.at_ms is not None:
            due_ms = max(due_ms, row.at_ms - first.at_ms)
        total = context + row.new_tokens
        ids += [fresh.new() for _ in range(total // size - len(ids))]
        yield Turn(round(due_ms, 3), delay_ms, tuple(ids), total, row.output_tokens)
        context = total + row.output_tokens


def _refuse_breaks(session: Session, size: int) -> None:
    for number, (before, turn) in enumerate(zip(session.turns, session.turns[1:], strict=False), start=2):
        shared = before.block_ids[: before.input_tokens // size]
        grows = turn.input_tokens > before.input_tokens + before.output_tokens
        if not grows or turn.block_ids[: len(shared)] != shared:
            raise CannotExpress(
                f"turn {number} of session `{session.session_id}` does not continue the turn before it (its context "
                "was cut or rewritten); rows of new tokens can only add to a context"
            )


def _rows(trace: Trace, numbers: dict[tuple[str, int], int]) -> Iterator[bytes]:
    unused = max(numbers.values(), default=-1) + 1
    for session in trace.sessions:
        context = 0
        for index, turn in enumerate(session.turns):
            new_tokens = turn.input_tokens - context
            row = {"session_id": session.session_id, "input_length": new_tokens, "output_length": turn.output_tokens}
            if index == 0:
                row["hash_ids"] = [numbers[session.scope, block] for block in turn.block_ids]
                row["timestamp"] = session.start_ms
            else:
                count = -(-new_tokens // trace.block_size_tokens)
                row["hash_ids"] = list(range(unused, unused + count))
                row["delay"] = turn.think_ms
                unused += count
            context = turn.input_tokens + turn.output_tokens
            yield msgspec.json.encode(row)
