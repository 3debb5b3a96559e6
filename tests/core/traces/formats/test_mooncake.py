from __future__ import annotations

import json

import pytest

from kvrelay.core.traces.formats import mooncake
from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.trace import NotTold, TraceError


def row(**members: object) -> bytes:
    return json.dumps(members).encode()


def test_rows_are_cumulative_requests_of_one_scope() -> None:
    trace = mooncake.read(
        [
            row(timestamp=0, input_length=1000, output_length=5, hash_ids=[0, 1]),
            row(timestamp=250, input_length=1030, output_length=9, hash_ids=[0, 1, 2]),
        ]
    )

    assert [(s.start_ms, s.scope, s.turns[0].block_ids) for s in trace.sessions] == [
        (0, "", (0, 1)),
        (250, "", (0, 1, 2)),
    ]
    assert (trace.block_size_tokens, trace.requests, trace.input_tokens) == (512, 2, 2030)
    assert trace.limitations() == ()
    assert trace.notices == ("Block size 512 tokens: the only power of two of 334 to 514 that agrees with all 2 rows.",)


def test_rows_of_a_session_are_its_turns_and_the_block_size_follows_from_all_rows() -> None:
    trace = mooncake.read(
        [
            row(session_id="s", timestamp=1000, input_length=17869, output_length=5, hash_ids=list(range(279))),
            row(session_id="t", timestamp=1500, input_length=64, output_length=5, hash_ids=[900]),
            row(session_id="s", timestamp=9000, input_length=18763, output_length=5, hash_ids=list(range(293))),
        ]
    )

    assert [(s.session_id, s.start_ms, [t.due_ms for t in s.turns]) for s in trace.sessions] == [
        ("s", 0, [0, 8000]),
        ("t", 500, [0]),
    ]
    assert trace.block_size_tokens == 64
    assert trace.notices == (
        "Rows of a session hold its whole context (each of 1 later rows begins like the one before it).",
        "Block size 64 tokens: the only size that agrees with all 3 rows.",
        "Times begin at 1000 ms on the file's clock: they are counted from the first request.",
    )


def test_rows_out_of_order_are_sorted_and_odd_ids_are_numbered_with_a_notice() -> None:
    trace = mooncake.read(
        [
            row(timestamp=700, input_length=40, output_length=1, hash_ids=["b", "c"]),
            row(timestamp=500, input_length=40, output_length=1, hash_ids=["a", "b"]),
            row(timestamp=500, input_length=40, output_length=1),
        ],
        ImportOptions(block_size_tokens=20),
    )

    assert [(s.session_id, s.start_ms, s.turns[0].block_ids) for s in trace.sessions] == [
        ("row-2", 0, (0, 1)),
        ("row-3", 0, ()),
        ("row-1", 200, (1, 2)),
    ]
    assert trace.notices == (
        "1 of 3 rows have no ids: their prompts share nothing.",
        "1 rows are earlier than the row before them: all rows are sorted by time.",
        "Times begin at 500 ms on the file's clock: they are counted from the first request.",
        "3 different ids are renumbered from 0, in the order in which they appear.",
    )


@pytest.mark.covers("BM-12")
@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (row(timestamp=0, input_length=5, hash_ids=[1]), "no `input_length` or no `output_length`"),
        (row(input_length=256, output_length=64), "no `timestamp`"),
        (row(timestamp=0, input_length=5000, output_length=64, hash_ids=[1]), "1 hash_ids for input_length 5000"),
        (row(timestamp=0, input_length=-5, output_length=64, hash_ids=[1]), "a negative length"),
        (row(timestamp=0, text_input="who are you", output_length=4), "a member `text_input` with text"),
        (row(timestamp=0, input_length=5, output_length=4, messages=[{"role": "user"}]), "`messages` with text"),
        (b"[]", "Expected `object`"),
        (b"{", "truncated"),
    ],
)
def test_rows_that_would_be_misread_are_refused(bad: bytes, found: str) -> None:
    with pytest.raises(TraceError) as problem:
        mooncake.read([row(timestamp=0, input_length=5, output_length=1, hash_ids=[1]), bad])

    assert (problem.value.line, found in problem.value.found) == (2, True), problem.value.found


def test_a_block_size_that_does_not_follow_is_asked_for() -> None:
    short = [row(timestamp=0, input_length=40, output_length=1, hash_ids=[1])]

    with pytest.raises(NotTold, match=r"several block sizes \(32, 64, 128, 256, 512, 1024, ... 4096\)") as problem:
        mooncake.read(short)

    assert problem.value.option == "block_size"
    assert mooncake.read(short, ImportOptions(block_size_tokens=64)).block_size_tokens == 64


def session_row(*ids: int, **time: float) -> bytes:
    return row(session_id="s", input_length=len(ids) * 512, output_length=10, hash_ids=ids, **time)


def test_rows_that_may_be_either_kind_are_asked_for() -> None:
    rows = [session_row(1, 2, timestamp=0), session_row(1, 2, 3, timestamp=9), session_row(7, timestamp=12)]
    told = ImportOptions(block_size_tokens=512)

    with pytest.raises(
        NotTold, match="2 later rows of sessions: 1 begin like the row before them, 1 do not"
    ) as problem:
        mooncake.read(rows, told)

    assert problem.value.option == "rows"
    cumulative = mooncake.read(rows, ImportOptions(512, rows="cumulative")).sessions[0]
    delta = mooncake.read(rows, ImportOptions(512, rows="delta")).sessions[0]
    assert [turn.input_tokens for turn in cumulative.turns] == [1024, 1536, 512]
    assert [turn.input_tokens for turn in delta.turns] == [1024, 1024 + 10 + 1536, 1024 + 10 + 1536 + 10 + 512]
