from __future__ import annotations

import pytest

from kvrelay.core.traces.plan import Scale, make_plan
from kvrelay.core.traces.presets import BLOCK_TOKENS, preset
from kvrelay.lab.arms.blocks import block_of
from kvrelay.lab.replay.phases import plan_of_phase
from kvrelay.lab.replay.sample import Sample

MADE = preset("cold_warm_restart")


def test_a_block_has_its_own_sessions_on_its_own_clock() -> None:
    plan = make_plan(MADE.trace, Scale(BLOCK_TOKENS), seed=42)

    parts = [plan_of_phase(plan, phase) for phase in MADE.phases]

    assert [len(part.sessions) for part in parts] == [12] * 6
    assert [part.sessions[0].session_id for part in parts] == [f"{phase.name}/request-000" for phase in MADE.phases]
    times = [[session.turns[0].due_ms for session in part.sessions] for part in parts]
    assert all(own == pytest.approx(times[0], abs=0.01) and own[0] == 0.0 for own in times)


def sample(number: int, *, cached: int | None = 16, failure: str | None = None) -> Sample:
    return Sample(
        arm="a", policy="p", repeat=0, request_id=str(number), session_id="s", turn=0, due_ms=0.0, sent_ms=0.0,
        ended_ms=9.0, first_token_ms=None if failure else 5.0, ttft_ms=None if failure else 5.0, prompt_tokens=64,
        cached_tokens=cached, failure=failure,
    )  # fmt: skip


def test_what_an_engine_did_not_report_is_not_zero() -> None:
    phase = MADE.phases[0]

    known = block_of(phase, [sample(0), sample(1, cached=32), sample(2, failure="HTTP 500")])
    unknown = block_of(phase, [sample(0), sample(1, cached=None)])

    assert (known.requests, known.failures, known.cached_tokens, known.hit_share) == (3, 1, 48, 0.375)
    assert known.ttft_ms.count == 2
    assert (unknown.cached_tokens, unknown.hit_share) == (None, None)
    assert block_of(phase, []).hit_share is None
