from __future__ import annotations

import pytest

from kvrelay.core.traces.plan import Plan, Scale, make_plan
from kvrelay.core.traces.trace import SESSION_SCOPE, Session, Trace, Turn


def turn(due_ms: float, *block_ids: int, think_ms: float = 0.0) -> Turn:
    return Turn(due_ms, think_ms, block_ids, 64 * len(block_ids), 100)


TRACE = Trace(
    64,
    SESSION_SCOPE,
    (
        Session("p", "p", (turn(0, 1), turn(10_000, 1, 2, think_ms=6_000), turn(900_000, 1, 2, 3, think_ms=880_000))),
        Session("p/agent", "p", (turn(0, 9), turn(5_000, 9, 10)), start_ms=12_000, parent_id="p"),
        Session("q", "q", (turn(0, 1),), start_ms=60_000),
    ),
)


def dues(plan: Plan) -> dict[str, list[float]]:
    return {session.session_id: [turn.due_ms for turn in session.turns] for session in plan.sessions}


def test_times_are_divided_gaps_capped_and_a_sub_agent_stays_where_its_parent_was() -> None:
    plan = make_plan(TRACE, Scale(16, time_divisor=100, session_gap_ms=150, max_gap_ms=300), seed=1)

    assert dues(plan) == {"p": [0, 100, 400], "p/agent": [120, 170], "q": [150]}
    assert [turn.think_ms for turn in plan.sessions[0].turns] == [0, 60, 300]


def test_without_caps_the_traces_own_clock_is_kept() -> None:
    plan = make_plan(TRACE, Scale(64), seed=1)

    assert dues(plan) == {"p": [0, 10_000, 900_000], "p/agent": [12_000, 17_000], "q": [60_000]}


def test_tokens_are_scaled_and_output_is_capped() -> None:
    plan = make_plan(TRACE, Scale(16, max_output_tokens=12), seed=1)

    assert [turn.token_ids.size for turn in plan.sessions[0].turns] == [16, 32, 48]
    assert {turn.max_tokens for session in plan.sessions for turn in session.turns} == {12}
    assert (plan.requests, plan.prompt_tokens) == (6, 16 * (1 + 2 + 3 + 1 + 2 + 1))


@pytest.mark.covers("BM-13")
def test_digest_follows_seed_and_schedule() -> None:
    scale = Scale(16, time_divisor=100)
    digest = make_plan(TRACE, scale, seed=1).digest()

    assert digest == make_plan(TRACE, scale, seed=1).digest()
    assert digest != make_plan(TRACE, scale, seed=2).digest()
    assert digest != make_plan(TRACE, Scale(16, time_divisor=101), seed=1).digest()
