"""What was measured elsewhere: our own receipts, and TraceLab's rounds."""

from __future__ import annotations

import json

import pytest
from tests.core.traces.public_traces import needs_public_traces, public_trace

from kvrelay.core.traces.formats import receipt_log, tracelab
from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.reuse import reuse_of
from kvrelay.core.traces.trace import NO_SCOPE, SESSION_SCOPE, TraceError


def receipt(session: str | None, **members: object) -> bytes:
    return json.dumps({"request_id": "r", "session_id": session, "route_reason": "score", **members}).encode()


def test_receipts_are_times_lengths_and_pauses() -> None:
    trace = receipt_log.read(
        [  # as they end, not as they came
            receipt("s", arrived_ms=1000.0, prompt_tokens=100, completion_tokens=9, e2e_ms=50.0),
            receipt(None, arrived_ms=990.0, prompt_tokens=70, completion_tokens=3, e2e_ms=500.0),
            receipt("s", arrived_ms=1080.0, prompt_tokens=130, completion_tokens=9, e2e_ms=20.0),
            receipt("s", arrived_ms=None, prompt_tokens=130),
        ]
    )

    assert trace.hash_scope == NO_SCOPE
    assert [(s.start_ms, [(t.due_ms, t.think_ms, t.input_tokens) for t in s.turns]) for s in trace.sessions] == [
        (0.0, [(0.0, 0.0, 70)]),
        (10.0, [(0.0, 0.0, 100), (80.0, 30.0, 130)]),
    ]
    assert trace.notices[0] == "1 receipts without a time or token count are left out."


def tool_round(number: int, total: int, prefix: int, *events: tuple[str, str]) -> bytes:
    timed = [{"event_type": kind, "timestamp": f"2026-06-01T05:40:{second}Z"} for kind, second in events]
    members = {"session_id": "s", "round_index": number, "input_tokens_total": total, "prefix_tokens": prefix}
    return json.dumps({**members, "output_tokens": 4, "timing_events": timed}).encode()


ROUNDS = [
    tool_round(0, 100, 40, ("user_message", "20.000"), ("text", "22.500")),
    tool_round(1, 150, 96, ("tool_result", "21.000"), ("tool_result", "24.000"), ("text", "26.000")),
    tool_round(2, 160, 30, ("user_message", "30.000"), ("text", "31.000")),
]


def test_rounds_are_asked_after_their_last_input() -> None:
    (session,) = tracelab.read(ROUNDS).sessions

    assert [(t.due_ms, t.think_ms) for t in session.turns] == [(0.0, 0.0), (4000.0, 1500.0), (10_000.0, 4000.0)]


def test_rounds_keep_their_blocks_as_far_as_the_providers_prefix_reached() -> None:
    trace = tracelab.read(ROUNDS, ImportOptions(block_size_tokens=16))

    ids = [turn.block_ids for turn in trace.sessions[0].turns]
    assert trace.hash_scope == SESSION_SCOPE
    assert [len(of_turn) for of_turn in ids] == [6, 9, 10]
    assert ids[1][:6] == ids[0] and ids[2][0] == ids[0][0] and ids[2][1] != ids[0][1]


@needs_public_traces
def test_hits_of_the_public_rounds_are_their_prefixes() -> None:
    """Of every round but a session's first, whose prefix came from sessions before the file began.

    Three of Codex's prefixes reach into the answer before them, which an endless cache of prompts does not hold.
    """
    reuse = reuse_of(public_trace("tracelab_example_rounds.jsonl", 1))

    claude = [29380, 35738, 38590, 41129, 41587, 42874, 44770, 45277, 47506]
    codex = [9600, 9856, 3456, 10240, 9216, 10624, 10368, 9216]
    in_answers = (9600 - 9324) + (10240 - 10152) + (10624 - 10436)
    assert (reuse.requests, reuse.hit_tokens) == (19, sum(claude) + sum(codex) - in_answers)


def test_files_without_anything_usable_are_refused() -> None:
    with pytest.raises(TraceError, match="an empty file"):
        receipt_log.read([receipt("s", arrived_ms=None)])
    with pytest.raises(TraceError, match="without readable `timing_events`"):
        tracelab.read([tool_round(0, 1, 1)])
