"""What is written is read back: the same sessions, times, lengths, and the same sharing of blocks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.traces.public_traces import lines, needs_public_traces, public_trace

from kvrelay.core.traces.formats import azure, bailian, burstgpt, delta, mooncake, native, weka
from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.formats.registry import FORMATS, format_of
from kvrelay.core.traces.trace import GLOBAL_SCOPE, SESSION_SCOPE, Session, Trace, Turn, arrivals

SIZE = 16
TOLD = ImportOptions(block_size_tokens=SIZE, rows="cumulative", time_unit="s")
tenths_ms = st.integers(0, 10**7).map(lambda tenths: tenths / 10)


@st.composite
def traces(draw: st.DrawFn, *, scope: str = GLOBAL_SCOPE) -> Trace:
    """Sessions that grow, share heads, and (with local ids) have sub-agents."""
    sessions: list[Session] = []
    for number in range(draw(st.integers(1, 4))):
        parent = None
        if scope == SESSION_SCOPE and sessions and draw(st.booleans()):
            parent = sessions[-1].parent_id or sessions[-1].session_id
        name = f"s{number}" if parent is None else f"{parent}/agent_{number}"
        own_scope = "" if scope == GLOBAL_SCOPE else (parent or name)
        start_ms = draw(tenths_ms) + number / 100  # no two requests of different sessions at the same moment
        sessions.append(Session(name, own_scope, draw(turns(number)), start_ms, parent))
    first_ms = min(session.start_ms for session in sessions)
    moved = [Session(s.session_id, s.scope, s.turns, round(s.start_ms - first_ms, 4), s.parent_id) for s in sessions]
    return Trace(SIZE, scope, tuple(moved))


@st.composite
def turns(draw: st.DrawFn, number: int) -> tuple[Turn, ...]:
    head = draw(st.integers(1, 3))
    tokens = head * SIZE + draw(st.integers(0, SIZE - 1))
    made, due_ms = [], 0.0
    for index in range(draw(st.integers(1, 3))):
        think_ms = draw(tenths_ms) if index else 0.0
        due_ms = round(due_ms + think_ms, 4)
        blocks = tokens // SIZE
        ids = tuple(range(head)) + tuple(1000 * (number + 1) + depth for depth in range(head, blocks))
        output = draw(st.integers(1, 40))
        made.append(Turn(due_ms, think_ms, ids, tokens, output))
        tokens += output + draw(st.integers(1, 40))
    return tuple(made)


def shape(trace: Trace, *, names: bool = True, think: bool = True, ids: bool = True) -> list[object]:
    """A trace with its ids numbered by appearance, so that two of the same structure are equal."""
    numbers: dict[tuple[str, int], int] = {}
    labels: dict[str, int] = {}
    return [
        (
            arrival.session.session_id if names else labels.setdefault(arrival.session.session_id, len(labels)),
            round(arrival.at_ms, 3),
            arrival.turn.think_ms if think else None,
            [numbers.setdefault((arrival.session.scope, i), len(numbers)) for i in arrival.turn.block_ids]
            if ids
            else 0,
            arrival.turn.input_tokens,
            arrival.turn.output_tokens,
        )
        for arrival in arrivals(trace)
    ]


@given(traces())
def test_our_own_format_loses_nothing(trace: Trace) -> None:
    assert native.read(native.write(trace).lines) == trace


@pytest.mark.covers("TP-09")
@given(traces(scope=SESSION_SCOPE))
def test_agent_sessions_keep_all_but_their_starts(trace: Trace) -> None:
    gap_ms = 123.0
    again = weka.read(weka.write(trace).lines, ImportOptions(session_gap_ms=gap_ms))

    kept = {session.session_id: session for session in again.sessions}
    roots = [session for session in trace.sessions if session.parent_id is None]
    starts = {root.session_id: root.start_ms for root in roots}
    assert len(kept) == len(trace.sessions)
    for number, root in enumerate(roots):
        assert kept[root.session_id].start_ms == number * gap_ms
    for session in trace.sessions:
        found = kept[session.session_id]
        assert (found.scope, found.turns, found.parent_id) == (session.scope, session.turns, session.parent_id)
        if session.parent_id is not None:
            offset_ms = found.start_ms - kept[session.parent_id].start_ms
            assert offset_ms == pytest.approx(session.start_ms - starts[session.parent_id], abs=0.001)


@pytest.mark.covers("TP-09")
@given(st.sampled_from([GLOBAL_SCOPE, SESSION_SCOPE]).flatmap(lambda scope: traces(scope=scope)))
def test_cumulative_rows_keep_all_but_think_times(trace: Trace) -> None:
    again = mooncake.read(mooncake.write(trace).lines, TOLD)

    assert shape(again, think=False) == shape(trace, think=False)


@pytest.mark.covers("TP-09")
@given(traces())
@settings(max_examples=60)
def test_delta_rows_keep_contexts_and_pauses(trace: Trace) -> None:
    told = ImportOptions(block_size_tokens=SIZE, rows="delta")

    first = mooncake.read(delta.write(trace).lines, told)
    again = mooncake.read(delta.write(first).lines, told)

    assert shape(again) == shape(first)
    for session in trace.sessions:
        (found,) = [one for one in first.sessions if one.session_id == session.session_id]
        assert [(t.input_tokens, t.output_tokens, t.think_ms) for t in found.turns] == [
            (t.input_tokens, t.output_tokens, t.think_ms) for t in session.turns
        ]
        assert found.turns[0].block_ids == session.turns[0].block_ids


@given(traces())
def test_chats_keep_all_but_names_and_think_times(trace: Trace) -> None:
    again = bailian.read(bailian.write(trace).lines, TOLD)

    assert shape(again, names=False, think=False) == shape(trace, names=False, think=False)


@given(traces())
def test_tables_keep_times_and_lengths(trace: Trace) -> None:
    for module in (azure, burstgpt):
        again = module.read(module.write(trace).lines)
        assert [(round(a.at_ms, 3), a.turn.input_tokens, a.turn.output_tokens) for a in arrivals(again)] == [
            (round(a.at_ms, 3), a.turn.input_tokens, a.turn.output_tokens) for a in arrivals(trace)
        ]


@given(traces())
def test_what_is_written_is_recognised(trace: Trace) -> None:
    for name, known in FORMATS.items():
        if known.write is not None and name != "aiperf":
            assert format_of(next(iter(known.write(trace).lines))) == name


@needs_public_traces
@pytest.mark.parametrize("file", ["mooncake_conversation_first1000.jsonl", "weka_small10_as_mooncake_blk64.jsonl.gz"])
def test_public_rows_are_written_as_they_were(file: str) -> None:
    written = [json.loads(line) for line in mooncake.write(public_trace(file)).lines]

    assert written == [json.loads(line) for line in lines(file)]


@needs_public_traces
def test_public_agent_sessions_are_read_back_and_have_the_members_of_their_format() -> None:
    trace = public_trace("weka_small10_sessions.jsonl.gz")
    written = list(weka.write(trace).lines)

    assert weka.read(written) == trace
    published = lines("weka_small10_sessions.jsonl.gz")
    for ours, theirs in zip(map(json.loads, written), map(json.loads, published), strict=True):
        assert {"id", "models", "block_size", "hash_id_scope", "requests"} <= set(ours) & set(theirs)
        assert [entry["t"] for entry in ours["requests"]] == sorted(entry["t"] for entry in theirs["requests"])
        members = {entry["type"]: set(entry) for entry in ours["requests"]}
        for entry in theirs["requests"]:
            assert members["subagent" if entry["type"] == "subagent" else "n"] <= set(entry)


@needs_public_traces
def test_public_multi_turn_rows_keep_lengths_and_delays() -> None:
    file = "aiperf_inference_day_4sessions.jsonl"
    written = [json.loads(line) for line in delta.write(public_trace(file)).lines]

    for ours, theirs in zip(written, map(json.loads, lines(file)), strict=True):
        same = ("session_id", "input_length", "output_length", "timestamp", "delay")
        assert [ours.get(name) for name in same] == [theirs.get(name) for name in same]
        assert len(ours["hash_ids"]) == len(theirs["hash_ids"])
