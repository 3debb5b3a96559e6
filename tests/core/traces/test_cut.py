from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.traces.cut import CutCounts, CutRule, cut
from kvrelay.core.traces.trace import SESSION_SCOPE, Session, Trace, Turn


def trace_of(*inputs: list[int]) -> Trace:
    sessions = tuple(
        Session(f"s{number}", f"s{number}", tuple(Turn(0.0, 0.0, (1,), tokens, 10) for tokens in turns))
        for number, turns in enumerate(inputs)
    )
    return Trace(64, SESSION_SCOPE, sessions)


def kept(trace: Trace) -> list[tuple[str, list[int]]]:
    return [(session.session_id, [turn.input_tokens for turn in session.turns]) for session in trace.sessions]


def test_over_long_turn_goes_with_all_that_follow_it() -> None:
    result = cut(trace_of([100, 990, 991, 5], [50]), CutRule(max_context_tokens=1000))

    assert kept(result.trace) == [("s0", [100, 990]), ("s1", [50])]
    assert (result.counts.over_long, result.counts.after_over_long, result.counts.excluded) == (1, 1, 2)


def test_whole_sessions_are_dropped_or_kept_in_order() -> None:
    trace = trace_of([1, 2, 3], [4], [5, 6], [7, 8], [9, 9])

    result = cut(trace, CutRule(min_turns_per_session=2, max_sessions=2))
    drawn = cut(trace, CutRule(max_sessions=3, sample_seed=11))

    assert kept(result.trace) == [("s0", [1, 2, 3]), ("s2", [5, 6])]
    assert (result.counts.session_too_short, result.counts.session_not_sampled) == (1, 4)
    names = [name for name, _ in kept(drawn.trace)]
    assert len(names) == 3 and names == sorted(names)
    assert drawn == cut(trace, CutRule(max_sessions=3, sample_seed=11))


def test_request_limit_keeps_the_head_of_the_session_that_crosses_it() -> None:
    result = cut(trace_of([1, 2], [3, 4, 5], [6]), CutRule(max_requests=4))

    assert kept(result.trace) == [("s0", [1, 2]), ("s1", [3, 4])]
    assert result.counts.beyond_request_limit == 2


@given(
    st.lists(st.lists(st.integers(1, 100), max_size=6), max_size=8),
    st.integers(1, 120),
    st.integers(1, 6),
    st.integers(0, 4),
    st.integers(0, 8),
    st.integers(0, 20),
)
def test_retained_and_excluded_add_up(
    inputs: list[list[int]], longest: int, turns: int, least: int, sessions: int, requests: int
) -> None:
    rule = CutRule(longest, turns, least, sessions, None, requests)
    result = cut(trace_of(*inputs), rule)

    counts = result.counts
    reasons = (
        counts.over_long
        + counts.after_over_long
        + counts.beyond_turn_limit
        + counts.session_too_short
        + counts.session_not_sampled
        + counts.beyond_request_limit
    )
    assert counts.received == sum(map(len, inputs)) == counts.retained + reasons
    assert result.trace.requests == counts.retained <= requests


def family(number: int) -> list[Session]:
    """Ten turns and a sub-agent."""
    turns = tuple(Turn(10.0 * n, 0.0, tuple(range(n + 1)), 64 * (n + 1), 8) for n in range(10))
    name = f"s{number}"
    helper = Session(f"{name}/helper", name, turns[:2], number * 100.0 + 5, name)
    return [Session(name, name, turns, number * 100.0), helper]


@pytest.mark.covers("BM-14", "BM-16", "S45")
def test_a_sample_keeps_whole_sessions_without_the_turns_that_do_not_fit_or_follow_one() -> None:
    sessions = [session for number in range(50) for session in family(number)]
    trace = Trace(64, SESSION_SCOPE, tuple(sessions))
    rule = CutRule(max_context_tokens=64 * 8 + 8, sample_share=0.1, sample_seed=7)

    first, again = cut(trace, rule), cut(trace, rule)
    other = cut(trace, CutRule(max_context_tokens=64 * 8 + 8, sample_share=0.1, sample_seed=8))

    assert first == again and first.trace != other.trace
    assert len(first.trace.sessions) == 10
    for session in first.trace.sessions:
        assert len(session.turns) == (2 if session.parent_id else 8)
        assert session.parent_id is None or session.parent_id in {s.session_id for s in first.trace.sessions}
    assert first.counts == CutCounts(
        received=600, retained=50, over_long=50, after_over_long=50, session_not_sampled=45 * 10
    )
    assert first.trace.label == "filtered synthetic subset"
    assert cut(trace, CutRule()).trace == trace
    labelled = cut(Trace(64, SESSION_SCOPE, tuple(sessions), label="agents"), CutRule(max_requests=3)).trace
    assert labelled.label == "agents, filtered synthetic subset"
    assert cut(labelled, CutRule(max_requests=2)).trace.label == labelled.label
