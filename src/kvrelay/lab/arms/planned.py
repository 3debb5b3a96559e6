"""The plan of a run without its tokens: what was to be sent, one line per turn.

It stays in the folder, and its digest in the manifest, so that a request which left no record is found out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvrelay.core.stats.seen_before import SeenBefore
from kvrelay.core.traces.plan import Plan

FILE = "planned.jsonl"


class PlannedRow(Struct, frozen=True):
    """`prefix_tokens`: what one endless cache would know of the prompt if all turns came as planned."""

    session_id: str
    turn: int
    due_ms: float
    think_ms: float
    prompt_tokens: int
    max_tokens: int
    prefix_tokens: int


def planned_rows(plan: Plan, *, block_size_tokens: int) -> tuple[PlannedRow, ...]:
    """In the order of the plan."""
    seen = SeenBefore(block_size_tokens)
    turns = [(session, index) for session in plan.sessions for index in range(len(session.turns))]
    in_time = sorted(turns, key=lambda item: item[0].turns[item[1]].due_ms)
    prefix = {(session.session_id, index): seen.take(session.turns[index].token_ids) for session, index in in_time}
    return tuple(
        PlannedRow(
            session_id=session.session_id,
            turn=index,
            due_ms=session.turns[index].due_ms,
            think_ms=session.turns[index].think_ms,
            prompt_tokens=int(session.turns[index].token_ids.size),
            max_tokens=session.turns[index].max_tokens,
            prefix_tokens=prefix[(session.session_id, index)],
        )
        for session, index in turns
    )


def rows_digest(rows: Iterable[PlannedRow]) -> str:
    return hashlib.sha256(_lines(rows)).hexdigest()


def write_rows(folder: Path, rows: Sequence[PlannedRow]) -> None:
    (folder / FILE).write_bytes(_lines(rows))


def read_rows(folder: Path) -> tuple[PlannedRow, ...]:
    """Raises OSError or msgspec.DecodeError."""
    decoder = msgspec.json.Decoder(PlannedRow)
    return tuple(decoder.decode(line) for line in (folder / FILE).read_bytes().splitlines())


def _lines(rows: Iterable[PlannedRow]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
