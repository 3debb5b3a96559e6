"""Deadlines for the first token: who would be late is passed over; where all would be, the client hears it at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.load.ledger import ACTIVE, FOREIGN, GENERATING, KINDS, QUEUED
from kvrelay.core.model.effects import Refuse, WakeAt
from kvrelay.core.model.events import CanGoOn, FirstTokenSeen, WokeUp
from kvrelay.core.model.units import DEADLINE_UNREACHABLE, FallbackReason, Fault, RouteReason, Status
from kvrelay.core.policy.first_token import first_token_ms, first_token_ms_of_many
from kvrelay.core.policy.policy import Arrays, Row
from kvrelay.core.policy.score_predict import PredictScorer
from tests.core.routing.rig import SIZE, Rig, chosen, text

RATE = 1_000.0  # prefill tokens per second, as nobody has shown another
WARM = text(1, blocks=64)  # 1,024 tokens


@pytest.fixture(params=["cache_load", "round_robin", "least_load", "sticky"])
def busy_holder(request):
    """`a` holds a prompt and has two seconds of prefill before it; `b` is idle and holds nothing."""
    return _busy_holder(request.param)


def _busy_holder(policy: str, **settings) -> Rig:
    rig = Rig(policy=policy, initial_prefill_tokens_per_s=RATE, **settings)
    rig.join("a")
    rig.hold("a", WARM)
    assert rig.ask(text(9, blocks=125), request_id="before", session_id="s") == "a"
    rig.accept("before")
    rig.join("b")
    return rig


@pytest.mark.covers("RT-19")
def test_who_would_be_late_is_passed_over_for_who_would_not():
    rig = _busy_holder("cache_load")
    assert rig.ask(WARM) == "a", "two seconds of queue cost less than computing it again and delaying others"
    assert rig.ask(WARM, request_id="hurried", deadline_ms=1_500.0) == "b"
    receipt = rig.finish("hurried")
    assert (receipt.chosen_worker, receipt.fallback_reason) == ("b", FallbackReason.DEADLINE)
    assert receipt.deadline_ms == 1_500.0
    assert receipt.over_deadline_ms == {"a": pytest.approx(2_000, rel=0.02)}
    assert [candidate.worker for candidate in receipt.candidates] == ["b"]


@pytest.mark.covers("RT-19")
def test_where_all_would_be_late_the_client_is_told_at_once_and_when_to_come_back(busy_holder):
    before = busy_holder.router.status(busy_holder.now).workers
    refusal = busy_holder.arrive(WARM, deadline_ms=200.0)[0]
    assert refusal == Refuse(busy_holder.last, 503, DEADLINE_UNREACHABLE, refusal.retry_after_s)
    assert 1.0 <= refusal.retry_after_s <= 2.0
    receipt = busy_holder.receipts[-1]
    assert (receipt.status, receipt.failure_reason, receipt.chosen_worker) == (
        Status.REFUSED,
        DEADLINE_UNREACHABLE,
        None,
    )
    assert set(receipt.over_deadline_ms) == {"a", "b"} and receipt.attempts == ()
    after = busy_holder.router.status(busy_holder.now).workers
    assert [w.targets[0].active_requests for w in before] == [w.targets[0].active_requests for w in after]


def test_every_policy_keeps_to_it(busy_holder):
    for _ in range(4):
        assert busy_holder.ask(text(2), deadline_ms=1_500.0) == "b"


def test_what_all_can_keep_changes_nothing():
    plain, hurried = _busy_holder("cache_load"), _busy_holder("cache_load")
    for number in range(20):
        prompt = text(number % 3, number % 5, blocks=4)
        one = plain.arrive(prompt, draw=number)
        other = hurried.arrive(prompt, draw=number, deadline_ms=60_000.0)
        assert one == other
    receipt = hurried.finish()
    assert receipt.fallback_reason is None and receipt.over_deadline_ms == {} and receipt.deadline_ms == 60_000.0


def test_a_session_leaves_its_worker_for_one_turn_and_stays_bound():
    rig = _busy_holder("sticky")
    assert rig.ask(text(2), session_id="s", deadline_ms=1_000.0) == "b"
    rig.accept()
    receipt = rig.finish()
    assert (receipt.route_reason, receipt.fallback_reason) == (
        RouteReason.AFFINITY_BROKEN_UNAVAILABLE,
        FallbackReason.DEADLINE,
    )
    assert rig.ask(text(2), session_id="s") == "a"


def test_a_place_to_wait_in_is_of_use_until_the_deadline():
    rig = Rig(policy="round_robin", queue_depth=5, queue_wait_s=30.0)
    rig.join("a", max_active_requests=1)
    rig.ask(text(1), request_id="first")
    effects = rig.arrive(text(2), request_id="patient")
    effects += rig.arrive(text(2), request_id="hurried", deadline_ms=400.0)
    alarms = [effect.at for effect in effects if isinstance(effect, WakeAt)]
    assert min(alarms) == pytest.approx(rig.now + 0.4)
    rig.now += 0.5
    refusal = rig.step(WokeUp())[0]
    assert (refusal.request_id, refusal.reason) == ("hurried", DEADLINE_UNREACHABLE)
    assert rig.router.status(rig.now).queue_depth == 1, "the one before it waits on"
    rig.finish("first")
    assert rig.router.status(rig.now).queue_depth == 0


def test_no_time_left_for_a_second_attempt():
    rig = Rig(policy="round_robin", initial_prefill_tokens_per_s=RATE)
    rig.join("a", "b")
    assert rig.ask(text(1, blocks=50), deadline_ms=1_000.0) == "a"
    rig.now += 0.5  # of the second; 800 tokens take 0.8
    refusal = rig.fail(Fault.RESET)[-2]
    assert isinstance(refusal, Refuse) and refusal.reason == DEADLINE_UNREACHABLE
    receipt = rig.receipts[-1]
    assert [attempt.worker for attempt in receipt.attempts] == ["a"] and set(receipt.over_deadline_ms) == {"b"}


def test_a_fleet_of_many_is_judged_as_one_of_few():
    rig = Rig(policy="cache_load", initial_prefill_tokens_per_s=RATE)
    names = [f"w{number:02}" for number in range(40)]
    rig.join(*names)
    for name in names[:39]:
        rig.hold(name, WARM)
    for number in range(80):  # two seconds of prefill for everybody
        assert rig.ask(text(100 + number, blocks=63), draw=number) in names
    assert rig.ask(WARM, deadline_ms=500.0) is None
    assert rig.receipts[-1].failure_reason == DEADLINE_UNREACHABLE and len(rig.receipts[-1].over_deadline_ms) == 8
    assert rig.ask(WARM, deadline_ms=2_600.0) in names


def test_a_prompt_of_unknown_length_is_judged_by_the_queue():
    rig = _busy_holder("cache_load")
    assert rig.ask(None, prompt_tokens=None, unscored="body_streamed", deadline_ms=500.0) == "b"


numbers = st.floats(0, 5_000).map(lambda value: round(value, 3))


@given(
    rows=st.lists(st.tuples(numbers, numbers, numbers, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9)
)
def test_what_is_expected_of_few_and_of_many_are_the_terms_that_the_request_feels(rows):
    few = [_row(*row) for row in rows]
    load = np.zeros((GENERATING + 1, len(few)))
    for at, row in enumerate(few):
        load[ACTIVE, at], load[QUEUED, at], load[FOREIGN, at] = row.active, row.queued, row.foreign
        load[GENERATING, at] = row.active - row.queued + row.foreign
    many = Arrays(
        ready_tokens=np.array([row.ready_tokens for row in few]),
        reachable_tokens=np.array([row.reachable_tokens for row in few]),
        transfer_ms=np.array([row.transfer_ms for row in few]),
        load=load,
        backlog_tokens=np.array([row.backlog_tokens for row in few]),
        growth_tokens=None,
        prefill_tokens_per_s=np.full(len(few), RATE),
        foreign_prefill_tokens=100.0,
        prompt_tokens=6_000,
        block_size_tokens=SIZE,
    )
    assert len(KINDS) == 5
    expected = [first_token_ms(row) for row in few]
    assert first_token_ms_of_many(many).tolist() == pytest.approx(expected)
    for row, ms in zip(few, expected, strict=True):
        terms = PredictScorer().terms(row)
        felt = sum(terms[name] for name in ("queue_ms", "compute_ms", "transfer_ms", "decode_ms"))
        assert ms == pytest.approx(felt)


def _row(reachable: float, backlog: float, transfer_ms: float, generating: int, foreign: int) -> Row:
    return Row(
        ready_tokens=0.0,
        reachable_tokens=reachable,
        transfer_ms=transfer_ms,
        active=float(generating + 1),
        queued=1.0,
        prefill_tokens=backlog,
        decode_blocks=0.0,
        foreign=float(foreign),
        recent_tokens=0.0,
        backlog_tokens=backlog,
        growth_tokens=17.0,
        prefill_tokens_per_s=RATE,
        foreign_prefill_tokens=100.0,
        prompt_tokens=6_000,
        block_size_tokens=SIZE,
    )


def test_a_stream_that_goes_on_elsewhere_has_its_first_token():
    rig = Rig(policy="round_robin", initial_prefill_tokens_per_s=RATE, migrate=True)
    rig.join("a", "b")
    assert rig.ask(text(1, blocks=10), deadline_ms=300.0) == "a"
    rig.step(FirstTokenSeen(rig.last))
    rig.now += 5.0
    assert chosen(rig.fail(Fault.RESET, relayed=True, rest=CanGoOn(3))) == "b"
