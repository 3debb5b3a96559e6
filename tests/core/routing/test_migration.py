"""A stream that breaks and goes on at another worker: when, at whose cost, and what is written down of it."""

from __future__ import annotations

import pytest

from kvrelay.core.model.effects import BreakOff, Dispatch, WriteReceipt
from kvrelay.core.model.events import (
    AttemptFailed,
    CanGoOn,
    CannotGoOn,
    ClientLeft,
    FirstTokenSeen,
    RequestFinished,
    WorkerDrained,
)
from kvrelay.core.model.prompt import Usage
from kvrelay.core.model.units import FallbackReason, Fault, RouteReason, Status
from kvrelay.core.routing.migration import hindrance
from tests.core.routing.rig import SIZE, Rig, text


@pytest.fixture
def rig():
    return begun(migrate=True)


def begun(**settings):
    """A fleet of three, and `r1` in the middle of its answer on `a`."""
    rig = Rig(policy="round_robin", health_failures=2, **settings)
    rig.join("a", "b", "c")
    rig.arrive(text(1))
    rig.accept()
    rig.step(FirstTokenSeen("r1"))
    return rig


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (AttemptFailed("r", 1, Fault.RESET, relayed=True, rest=CanGoOn(5)), None),
        (AttemptFailed("r", 1, Fault.IDLE_TIMEOUT, relayed=True, rest=CanGoOn(0)), None),
        (AttemptFailed("r", 1, Fault.RESET, relayed=True, rest=CannotGoOn("tools")), "tools"),
        (AttemptFailed("r", 1, Fault.RESET, relayed=True), "not_followed"),
        (AttemptFailed("r", 2, Fault.NOT_CONTINUED, relayed=True, rest=CanGoOn(5)), "not_continued"),
    ],
)
def test_what_is_continued(event, expected):
    assert hindrance(event) == expected


@pytest.mark.covers("RT-23", "RC-11", "RC-13")
def test_a_stream_goes_on_at_another_worker_and_the_receipt_says_so(rig):
    (dispatch,) = rig.fail(Fault.RESET, relayed=True, rest=CanGoOn(7))
    assert dispatch == Dispatch("r1", 2, rig.live_id("b"), None, 0, RouteReason.ROUND_ROBIN, continues=True)
    assert rig.load("a") == [0, 0, 0]
    assert rig.load("b") == [1, SIZE + 1 + 7, 0], "it prefills the prompt and what was generated of the answer"
    rig.accept(attempt=2)
    rig.step(FirstTokenSeen("r1"))
    assert rig.load("b") == [1, 0, 2]
    (written,) = rig.step(RequestFinished("r1", 200, Usage(SIZE + 1, 20, 0)))
    receipt = written.receipt
    assert (receipt.status, receipt.migrations, receipt.not_migrated_because) == (Status.OK, 1, None)
    assert receipt.fallback_reason is FallbackReason.MIGRATED and receipt.chosen_worker == "b"
    assert [(each.worker, each.fault, each.continued) for each in receipt.attempts] == [
        ("a", Fault.RESET, False),
        ("b", None, True),
    ]
    assert receipt.ttft_ms == 2.0, "the client had its first token from the first worker"
    assert rig.load("b") == [0, 0, 0]


@pytest.mark.covers("RT-23")
def test_without_the_setting_a_running_generation_stays_where_it_is():
    rig = begun()
    ending, written = rig.fail(Fault.RESET, relayed=True, rest=CanGoOn(7))
    assert ending == BreakOff("r1", Status.WORKER_LOST, "worker_lost")
    assert (written.receipt.migrations, written.receipt.not_migrated_because) == (0, None)


@pytest.mark.parametrize(
    ("settings", "failure", "because"),
    [
        ({}, {"rest": CannotGoOn("several_choices")}, "several_choices"),
        ({}, {"rest": CanGoOn(1), "fault": Fault.TOTAL_TIMEOUT}, "time_over"),
        ({"retry_attempts": 1}, {"rest": CanGoOn(1)}, "attempts_used_up"),
        ({"retry_budget_ratio": 0.0}, {"rest": CanGoOn(1)}, "budget_spent"),
    ],
)
def test_what_is_not_continued_breaks_visibly_and_the_receipt_says_why(settings, failure, because):
    rig = begun(migrate=True, **settings)
    fault = failure.pop("fault", Fault.RESET)
    ending = rig.fail(fault, relayed=True, **failure)[-2]
    assert isinstance(ending, BreakOff)
    assert (rig.receipts[-1].not_migrated_because, rig.receipts[-1].migrations) == (because, 0)


def test_without_another_worker_the_stream_breaks(rig):
    for name in "bc":
        rig.step(WorkerDrained(name))
    assert isinstance(rig.fail(Fault.RESET, relayed=True, rest=CanGoOn(3))[0], BreakOff)
    assert rig.receipts[-1].not_migrated_because == "all_tried"


def test_a_stream_may_move_more_than_once_and_never_back(rig):
    moved = [rig.fail(Fault.RESET, attempt=n, relayed=True, rest=CanGoOn(n))[0] for n in (1, 2)]
    assert [dispatch.worker.name for dispatch in moved] == ["b", "c"]
    ending = rig.fail(Fault.RESET, attempt=3, relayed=True, rest=CanGoOn(3))
    assert any(isinstance(effect, BreakOff) for effect in ending)
    assert (rig.receipts[-1].migrations, rig.receipts[-1].not_migrated_because) == (2, "attempts_used_up")


@pytest.mark.parametrize("fault", [Fault.BACK_PRESSURE, Fault.SERVER_ERROR, Fault.CONNECT, Fault.FIRST_BYTE_TIMEOUT])
def test_a_worker_that_does_not_take_it_up_is_passed_by(rig, fault):
    rig.fail(Fault.RESET, relayed=True, rest=CanGoOn(3))
    effects = rig.fail(fault, attempt=2, relayed=True, rest=CanGoOn(3), http_status=503)
    dispatch = next(effect for effect in effects if isinstance(effect, Dispatch))
    assert (dispatch.worker.name, dispatch.continues) == ("c", True)
    assert rig.finish().status is Status.OK


@pytest.mark.parametrize("fault", [Fault.BACK_PRESSURE, Fault.SERVER_ERROR, Fault.NOT_CONTINUED])
def test_when_nobody_takes_it_up_the_worker_that_was_lost_is_the_reason(fault):
    rig = begun(migrate=True, retry_attempts=2)
    rig.fail(Fault.RESET, relayed=True, rest=CanGoOn(3))
    effects = rig.fail(fault, attempt=2, relayed=True, rest=CanGoOn(3), http_status=503)
    assert BreakOff("r1", Status.WORKER_LOST, "worker_lost") in effects
    assert rig.receipts[-1].status is Status.WORKER_LOST


def test_a_client_that_leaves_between_two_workers_closes_the_books(rig):
    rig.fail(Fault.RESET, relayed=True, rest=CanGoOn(3))
    effects = rig.step(ClientLeft("r1"))
    assert isinstance(effects[-1], WriteReceipt) and effects[-1].receipt.status is Status.CLIENT_CANCELLED
    assert all(rig.load(name) == [0, 0, 0] for name in "abc")


@pytest.mark.covers("RT-23", "S24")
def test_all_streams_of_a_lost_worker_move_as_its_death_is_one_failure():
    rig = Rig(policy="round_robin", migrate=True, retry_budget_ratio=0.1)
    rig.join("a", "b", "c")
    for _ in range(900):
        rig.arrive(text(1))
    for number in range(1, 901):
        rig.accept(f"r{number}")
    of_a, of_b = ([f"r{number}" for number in range(first, 901, 3)] for first in (1, 2))
    moved = [rig.fail(Fault.RESET, request, relayed=True, rest=CanGoOn(2)) for request in of_a]
    assert all(any(isinstance(effect, Dispatch) for effect in effects) for effects in moved)
    again = [rig.fail(Fault.RESET, request, relayed=True, rest=CanGoOn(2)) for request in of_b]
    assert all(any(isinstance(effect, Dispatch) for effect in effects) for effects in again), (
        "a second one right behind"
    )


def test_streams_that_break_on_a_worker_that_had_been_given_up_before_they_came_pay_for_moving():
    """Its trials and last resorts are not its death."""
    rig = Rig(policy="round_robin", migrate=True, retry_budget_ratio=0.1, retry_attempts=2)
    rig.join("a")
    for _ in range(200):
        rig.arrive(text(1))
        rig.accept()
        rig.join("b")
        rig.fail(Fault.RESET, rig.last, relayed=True, rest=CanGoOn(2))
        if rig.last not in {receipt.request_id for receipt in rig.receipts}:
            rig.finish()
        rig.leave("b")
    assert any(receipt.not_migrated_because == "budget_spent" for receipt in rig.receipts)
    assert sum(receipt.migrations for receipt in rig.receipts) <= 100 + 0.1 * 200 + rig.now + 1
