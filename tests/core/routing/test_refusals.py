"""A worker that says "not now" is passed over for a moment, is tried by one request, and is never missed when alone."""

from __future__ import annotations

import pytest

from kvrelay.core.model.units import Fault, Status
from kvrelay.core.routing.refusals import Refusals
from tests.core.routing.rig import Rig, chosen, text


def test_a_pause_a_trial_and_the_end():
    refusals = Refusals()
    assert refusals.passed_over(0.0) == ()
    refusals.refused(0.0, "a", None)
    assert refusals.passed_over(0.4) == ("a",)
    refusals.dispatched(0.4, "a")  # nobody else was there
    assert refusals.passed_over(0.4) == ("a",) and refusals.passed_over(0.6) == ()
    refusals.dispatched(0.6, "a")
    assert refusals.passed_over(0.7) == ("a",), "one at a time"
    assert refusals.passed_over(0.9) == ()
    refusals.dispatched(0.9, "a")
    assert refusals.passed_over(0.9) == (), "the trial was not refused"


def test_a_refused_trial_pauses_again_and_a_served_request_ends_the_pause():
    refusals = Refusals()
    refusals.refused(0.0, "a", None)
    refusals.dispatched(0.6, "a")
    refusals.refused(0.61, "a", None)
    assert refusals.passed_over(1.0) == ("a",)
    refusals.forget("a")
    refusals.forget("b")
    assert refusals.passed_over(1.0) == ()


@pytest.mark.parametrize(("hint_s", "pause_s"), [(None, 0.5), (0.3, 0.3), (0.0, 0.1), (7.0, 1.0), (1e9, 1.0)])
def test_a_hint_counts_within_a_bound(hint_s, pause_s):
    refusals = Refusals()
    refusals.refused(10.0, "a", hint_s)
    assert refusals.passed_over(10.0 + pause_s - 0.01) == ("a",)
    assert refusals.passed_over(10.0 + pause_s) == ()


SHARED = text(1, 2, 3, blocks=20)
HINT = {"http_status": 429, "retry_after_s": 7.0}


def two_workers(**settings) -> Rig:
    rig = Rig(policy="cache_load", **settings)
    rig.join("a", "b")
    rig.hold("a", SHARED)
    return rig


@pytest.mark.covers("S25")
def test_a_full_holder_does_not_use_up_the_budget_for_retries():
    rig = two_workers(retry_budget_ratio=0.0)
    for _ in range(200):  # a millisecond or so between events
        if rig.ask(SHARED) == "a":
            rig.fail(Fault.BACK_PRESSURE, **HINT)
        rig.finish()
    assert [receipt.status for receipt in rig.receipts] == [Status.OK] * 200
    assert sum(len(receipt.attempts) for receipt in rig.receipts) <= 203


def test_many_requests_to_a_worker_that_just_went_down_do_not_use_up_the_budget():
    """All were sent before the first refused connection was noticed; none of them had cost anybody anything."""
    rig = two_workers(retry_budget_ratio=0.0)
    asked = [f"r{number}" for number in range(150)]
    on_a = [request_id for request_id in asked if rig.ask(SHARED, request_id=request_id) == "a"]
    assert len(on_a) > 20
    for request_id in on_a:
        assert chosen(rig.fail(Fault.CONNECT, request_id=request_id)) == "b"


def test_it_is_preferred_again_once_it_is_not_refused_any_more():
    rig = two_workers()
    assert rig.ask(SHARED) == "a"
    rig.fail(Fault.BACK_PRESSURE, **HINT)
    rig.finish()
    assert rig.ask(SHARED) == "b"
    rig.finish()
    rig.now += 1.0
    assert rig.ask(SHARED) == "a"
    rig.finish()
    assert rig.ask(SHARED) == "a"


def test_who_is_alone_or_refuses_like_all_others_is_asked_all_the_same():
    rig = Rig()
    rig.join("a")
    for _ in range(5):
        assert rig.ask() == "a"
        rig.fail(Fault.BACK_PRESSURE, **HINT)
    rig.join("b")
    assert rig.ask() == "b"
    rig.fail(Fault.BACK_PRESSURE, **HINT)  # tried on a, which passes its refusal on
    rig.fail(Fault.BACK_PRESSURE, attempt=2, **HINT)
    assert [attempt.worker for attempt in rig.receipts[-1].attempts] == ["b", "a"]


def test_a_new_life_of_the_worker_starts_without_a_pause():
    rig = two_workers()
    rig.ask(SHARED)
    rig.fail(Fault.BACK_PRESSURE, **HINT)
    rig.finish()
    rig.leave("a")
    rig.join("a", incarnation="2")
    rig.hold("a", SHARED)
    assert rig.ask(SHARED) == "a"


@pytest.mark.covers("S25")
def test_many_at_once_are_all_sent_on_as_long_as_somebody_does_not_refuse():
    rig = two_workers(retry_budget_ratio=0.0)
    asked = {f"q{number}": rig.ask(SHARED, request_id=f"q{number}") for number in range(60)}
    on_a = [request_id for request_id, name in asked.items() if name == "a"]
    assert len(on_a) > 20, "more than the allowance of the budget"
    for request_id in on_a:
        assert chosen(rig.fail(Fault.BACK_PRESSURE, request_id=request_id, **HINT)) == "b"
    for request_id in asked:
        assert rig.finish(request_id).status is Status.OK


def test_a_fleet_that_refuses_as_a_whole_is_not_stormed():
    rig = two_workers(retry_budget_ratio=0.0)
    for number in range(60):
        rig.arrive(SHARED, request_id=f"q{number}")
    for number in range(60):
        rig.fail(Fault.BACK_PRESSURE, request_id=f"q{number}", **HINT)
        if len(rig.receipts) == number:
            rig.fail(Fault.BACK_PRESSURE, request_id=f"q{number}", attempt=2, **HINT)
    assert sum(len(receipt.attempts) for receipt in rig.receipts) <= 60 + 10 + 1
