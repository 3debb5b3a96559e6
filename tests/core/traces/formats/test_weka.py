from __future__ import annotations

import json

import pytest

from kvrelay.core.traces.formats import weka
from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.trace import TraceError


def request(t: float, ids: list[int], **more: object) -> dict[str, object]:
    return {"t": t, "type": "n", "in": len(ids) * 64 + 5, "out": 7, "hash_ids": ids, "api_time": 2.0, **more}


def line(*entries: dict[str, object], name: str = "s1", **more: object) -> bytes:
    return json.dumps({"id": name, "block_size": 64, "requests": entries, **more}).encode()


def test_sub_agent_becomes_a_session_of_its_own_in_its_parents_scope() -> None:
    sub = {
        "t": 30.5,
        "type": "subagent",
        "agent_id": "agent_001",
        "requests": [request(0.0, [7]), request(5.0, [7, 8])],
    }

    trace = weka.read([line(request(0.0, [1, 2]), sub, request(40.0, [1, 2, 3]))])

    parent, child = trace.sessions
    assert (parent.session_id, parent.scope, [t.due_ms for t in parent.turns]) == ("s1", "s1", [0.0, 40_000.0])
    assert (child.session_id, child.scope, child.parent_id) == ("s1/agent_001", "s1", "s1")
    assert (child.start_ms, [t.due_ms for t in child.turns]) == (30_500.0, [0.0, 5_000.0])


def test_sessions_start_a_gap_apart_and_have_different_scopes() -> None:
    trace = weka.read(
        [line(request(0, [1]), name="a"), b"", line(request(0, [1]), name="b")], ImportOptions(session_gap_ms=1000)
    )

    assert [(s.start_ms, s.scope) for s in trace.sessions] == [(0.0, "a"), (1000.0, "b")]
    assert trace.limitations()


def test_think_time_is_the_traces_own_or_what_the_times_leave() -> None:
    trace = weka.read(
        [line(request(0, [1], think_time=0.0), request(9, [1], think_time=4.5), request(20, [1], think_time=None))]
    )

    assert [turn.think_ms for turn in trace.sessions[0].turns] == [0.0, 4500.0, 9000.0]


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (b'{"id": "x"', "not JSON"),
        (b'{"id": "x", "block_size": 64}', "missing required field `requests`"),
        (line({"t": 0.0, "type": "n", "in": 3}), "without in, out or hash_ids"),
        (line(request(0, [1], messages=[{"role": "user"}])), "`messages` with text"),
    ],
)
def test_bad_line_is_named_with_what_would_be_legal(bad: bytes, found: str) -> None:
    with pytest.raises(TraceError) as problem:
        weka.read([line(request(0, [1])), bad])

    assert problem.value.line == 2
    assert found in problem.value.found
    assert problem.value.legal


def test_empty_file_and_mixed_block_sizes_are_refused() -> None:
    with pytest.raises(TraceError, match="empty file"):
        weka.read([])
    other = json.dumps({"id": "z", "block_size": 32, "requests": []}).encode()
    with pytest.raises(TraceError, match="one block size, 64"):
        weka.read([line(request(0, [1])), other])
