"""A thousand requests on their schedule, in real time: once against a fast worker, once with too few places."""

from __future__ import annotations

import pytest

from kvrelay.core.traces.plan import Scale, make_plan
from kvrelay.core.traces.trace import GLOBAL_SCOPE, Session, Trace, Turn
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.replay.client import CompletionClient
from kvrelay.lab.replay.replay import Arm, replay
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sending import Sending, sending

pytestmark = pytest.mark.real

REQUESTS, GAP_MS = 1000, 20.0
FAST = MockSpec(name="fast", decode_ms=1.0, prefill_tokens_per_s=1e6)
SLOW = MockSpec(name="slow", decode_ms=50.0)  # an answer takes 200 ms, so 6 places make 30 a second, of 50 wanted


async def replayed(spec: MockSpec, cap: int | None) -> tuple[list[Sample], Sending]:
    one = (Turn(0.0, 0.0, (1, 2), 32, 4),)
    sessions = tuple(Session(f"s{number}", "", one, number * GAP_MS) for number in range(REQUESTS))
    plan = make_plan(Trace(16, GLOBAL_SCOPE, sessions), Scale(16), seed=1)
    samples: list[Sample] = []
    async with MockFleet([spec]) as fleet, CompletionClient(fleet.workers[0].url, timeout_s=60.0) as client:
        await replay(plan, client, arm=Arm("none", 0), model="mock-model", on_sample=samples.append, max_in_flight=cap)
    return samples, sending(samples, max_in_flight=cap)


@pytest.mark.covers("S44")
async def test_a_fast_worker_is_sent_to_on_time() -> None:
    samples, report = await replayed(FAST, None)

    assert len(samples) == REQUESTS and all(sample.ok for sample in samples)
    for sample in samples:
        assert sample.written_ms is not None and sample.first_token_ms is not None
        assert sample.due_ms <= sample.sent_ms <= sample.written_ms <= sample.first_token_ms <= sample.ended_ms
    last = max(samples, key=lambda sample: sample.due_ms)
    assert (last.due_ms, report.open_loop, report.held_requests) == (999 * GAP_MS, True, 0)
    assert last.lateness_ms <= 50.0


@pytest.mark.covers("S44")
async def test_a_cap_that_cannot_keep_up_shows_as_lateness_of_its_own() -> None:
    samples, report = await replayed(SLOW, 6)

    assert len(samples) == REQUESTS and all(sample.ok for sample in samples)
    assert (report.open_loop, report.max_in_flight) == (False, 6)
    assert report.why_not is not None and "waited for one of 6 places in flight" in report.why_not
    assert report.held_requests > REQUESTS // 2
    assert report.held_ms.max is not None and report.skew_ms.p50 is not None
    assert report.held_ms.max > 5_000.0 > 50.0 > report.skew_ms.p50
