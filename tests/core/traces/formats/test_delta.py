from __future__ import annotations

import json

import pytest

from kvrelay.core.traces.formats import delta, mooncake
from kvrelay.core.traces.formats.options import CannotExpress, ImportOptions
from kvrelay.core.traces.formats.registry import FORMATS
from kvrelay.core.traces.reuse import reuse_of
from kvrelay.core.traces.trace import GLOBAL_SCOPE, Session, Trace, TraceError, Turn


def row(session: str, tokens: int, ids: list[int], **time: float) -> bytes:
    members = {"session_id": session, "input_length": tokens, "output_length": 30, "hash_ids": ids, **time}
    return json.dumps(members).encode()


TWO_SESSIONS = [
    row("a", 250, [0, 1, 2], timestamp=100.0),
    row("a", 120, [3, 4], delay=40.0),
    row("a", 10, [5], delay=0.5),
    row("b", 250, [0, 1, 2], timestamp=300.0),
    row("b", 120, [3, 4], delay=7.0),
]


def test_contexts_grow_by_the_new_tokens_and_the_answer_between() -> None:
    a, b = mooncake.read(TWO_SESSIONS, ImportOptions(100)).sessions

    assert [(t.due_ms, t.think_ms, t.input_tokens, t.block_ids) for t in a.turns] == [
        (0.0, 0.0, 250, (0, 1, 2)),
        (40.0, 40.0, 400, (0, 1, 6, 7)),  # 250 + 30 + 120: the third block holds an answer, so it has a new id
        (40.5, 0.5, 440, (0, 1, 6, 7)),
    ]
    assert (a.start_ms, b.start_ms) == (0.0, 200.0)
    assert [t.block_ids for t in b.turns] == [(0, 1, 2), (0, 1, 8, 9)]  # the same ids, after another answer


def test_the_same_new_tokens_after_different_answers_share_nothing() -> None:
    reuse = reuse_of(mooncake.read(TWO_SESSIONS, ImportOptions(100)), tail_rule="full")

    assert (reuse.hit_blocks, reuse.own_hit_blocks) == (2 + 4 + 2 + 2, 2 + 4 + 2)


def test_the_name_of_the_format_tells_what_the_rows_hold() -> None:
    alone = [row("a", 250, [0, 1, 2], timestamp=0.0), row("a", 250, [0, 1, 2], delay=1.0)]

    told = FORMATS["aiperf"].read(alone, ImportOptions(100))

    assert [turn.input_tokens for turn in told.sessions[0].turns] == [250, 250 + 30 + 250]


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (row("c", 10, [1], delay=3.0), "session `c` begins without a `timestamp`"),
        (row("a", 10, [1]), "no `timestamp`"),
    ],
)
def test_rows_without_their_time_are_refused(bad: bytes, found: str) -> None:
    with pytest.raises(TraceError, match=found):
        mooncake.read([*TWO_SESSIONS, bad], ImportOptions(100))


def test_a_context_that_was_cut_cannot_be_written_as_new_tokens() -> None:
    turns = (Turn(0.0, 0.0, (1, 2), 200, 5), Turn(9.0, 9.0, (1, 7), 230, 5), Turn(19.0, 9.0, (1,), 100, 5))
    trace = Trace(100, GLOBAL_SCOPE, (Session("s", "", turns),))

    with pytest.raises(CannotExpress, match="turn 2 of session `s` does not continue"):
        delta.write(trace)
