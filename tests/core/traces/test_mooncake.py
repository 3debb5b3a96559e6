from __future__ import annotations

import json

import pytest

from kvrelay.core.traces.mooncake import read_mooncake
from kvrelay.core.traces.trace import TraceError


def row(**members: object) -> bytes:
    return json.dumps(members).encode()


def test_rows_are_cumulative_requests_of_one_scope() -> None:
    trace = read_mooncake(
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


def test_rows_of_a_session_are_its_turns_and_the_block_size_follows_from_all_rows() -> None:
    trace = read_mooncake(
        [
            row(session_id="s", timestamp=1000, input_length=17869, output_length=5, hash_ids=list(range(279))),
            row(session_id="t", timestamp=1500, input_length=64, output_length=5, hash_ids=[900]),
            row(session_id="s", timestamp=9000, input_length=18763, output_length=5, hash_ids=list(range(293))),
        ]
    )

    assert [(s.session_id, s.start_ms, [t.due_ms for t in s.turns]) for s in trace.sessions] == [
        ("s", 1000, [0, 8000]),
        ("t", 1500, [0]),
    ]
    assert trace.block_size_tokens == 64


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (row(session_id="s", input_length=5, output_length=1, hash_ids=[1], delay=3.0), "only the new tokens"),
        (row(timestamp=0, input_length=256, output_length=64), "no `timestamp` or no `hash_ids`"),
        (row(timestamp=0, input_length=5000, output_length=64, hash_ids=[1]), "1 hash_ids for input_length 5000"),
        (b"[]", "Expected `object`"),
        (b"{", "truncated"),
    ],
)
def test_rows_that_would_be_misread_are_refused(bad: bytes, found: str) -> None:
    with pytest.raises(TraceError) as problem:
        read_mooncake([row(timestamp=0, input_length=5, output_length=1, hash_ids=[1]), bad])

    assert (problem.value.line, found in problem.value.found) == (2, True), problem.value.found
