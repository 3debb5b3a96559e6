"""When nobody routable is left: who is tried all the same, and who is not."""

from __future__ import annotations

import pytest

from kvrelay.core.model.effects import Dispatch, Hasten, PassThrough, Refuse, Report
from kvrelay.core.model.events import ClientLeft, ProbeAnswered, WorkerDrained
from kvrelay.core.model.units import FallbackReason, Fault, RouteReason, Status
from tests.core.routing.rig import Rig, chosen, text


@pytest.fixture
def rig():
    rig = Rig(policy="round_robin", health_failures=1)
    rig.join("a", "b", "c")
    return rig


def standings(rig):
    return {worker.name: worker.standing for worker in rig.router.status(rig.now).workers}


@pytest.mark.covers("S26", "RT-26")
def test_a_fleet_that_is_suspended_as_a_whole_still_serves(rig):
    for name in "abc":
        rig.arrive(text(1), request_id=name)
    for name in "abc":
        rig.accept(name)
        rig.fail(Fault.RESET, name, relayed=True)
    assert set(standings(rig).values()) == {"suspended"} and rig.router.ready(rig.now)
    receipts = [rig.serve(text(1)) for _ in range(6)]
    assert [receipt.status for receipt in receipts] == [Status.OK] * 6
    assert receipts[0].fallback_reason is FallbackReason.LAST_RESORT
    assert receipts[0].chosen_worker in standings(rig)
    assert standings(rig)[receipts[0].chosen_worker] == "routable", "what ended well there ended its suspension"


def test_while_somebody_is_routable_the_suspended_are_left_alone(rig):
    rig.arrive(text(1), request_id="x")
    rig.fail(Fault.SERVER_ERROR, "x", http_status=500)
    rig.finish("x")
    assert standings(rig)["a"] == "suspended"
    assert "a" not in {rig.serve(text(1)).chosen_worker for _ in range(12)}


def test_of_suspended_workers_the_one_with_the_fewest_relapses_is_tried():
    rig = Rig(policy="round_robin", health_failures=1)
    rig.join("a")
    for _ in range(3):  # fails for good
        rig.now += 60.0
        rig.arrive(text(1))
        rig.fail(Fault.SERVER_ERROR, http_status=500)
    rig.join("b")  # fails for a moment
    assert rig.ask(text(1), request_id="y") == "b"
    rig.fail(Fault.RESET, "y", relayed=True)
    assert standings(rig) == {"a": "suspended", "b": "suspended"}
    assert [rig.ask(text(1)) for _ in range(3)] == ["b", "b", "b"]


def test_a_request_that_failed_on_all_routable_workers_gets_a_suspended_one_before_it_gives_up(rig):
    rig.leave("c")
    rig.arrive(text(1), request_id="x")
    rig.fail(Fault.SERVER_ERROR, "x", http_status=500)
    rig.finish("x")
    assert rig.ask(text(1), request_id="y") == "b"
    assert chosen(rig.fail(Fault.RESET, "y")) == "a"
    assert rig.finish("y").fallback_reason is FallbackReason.RETRIED_ELSEWHERE


def test_one_worker_alone_answers_with_its_own_errors_and_not_with_our_refusal():
    rig = Rig(policy="round_robin", health_failures=2)
    rig.join("a")
    for _ in range(20):
        assert rig.ask(text(1)) == "a"
        assert rig.fail(Fault.SERVER_ERROR, http_status=500)[-2] == PassThrough(rig.last)
    assert rig.serve(text(1)).status is Status.OK
    assert standings(rig) == {"a": "routable"}


def test_a_refused_connection_is_tried_again_until_a_probe_says_that_the_worker_is_gone(rig):
    for name in "abc":
        rig.arrive(text(1), request_id=name)
    for name in "abc":
        rig.fail(Fault.CONNECT, name)
    assert set(standings(rig).values()) == {"unreached"}
    assert rig.ask(text(1)) is not None
    for name in "abc":
        rig.step(ProbeAnswered(rig.live_id(name), ok=False))
    assert set(standings(rig).values()) == {"dead"} and not rig.router.ready(rig.now)
    assert rig.arrive(text(1))[0] == Refuse(rig.last, 503, "no_worker_alive", 1.0)


def test_a_suspended_worker_is_better_than_draining_ones(rig):
    rig.arrive(text(1), request_id="x")
    rig.fail(Fault.SERVER_ERROR, "x", http_status=500)
    rig.finish("x")
    for name in "bc":
        rig.step(WorkerDrained(name))
    assert rig.ask(text(1)) == "a"
    rig.step(WorkerDrained("a"))
    assert rig.arrive(text(1))[0].reason == "all_draining"


def test_a_model_whose_worker_is_out_is_not_asked_of_workers_that_do_not_have_it():
    rig = Rig(policy="round_robin", health_failures=1)
    rig.join("a", models=("m",))
    rig.join("b", models=("n",))
    rig.step(ProbeAnswered(rig.live_id("a"), ok=False))
    assert rig.arrive(model="m")[0].reason == "no_worker_for_model"
    assert rig.ask(model="n") == "b" and rig.ask(model="nobody has it") == "b"


def test_a_session_stays_with_its_worker_when_that_is_the_last_resort():
    rig = Rig(policy="sticky", health_failures=1)
    rig.join("a", "b")
    assert rig.serve(session_id="s").chosen_worker == "a"
    for request in ("x", "y"):
        rig.arrive(request_id=request)
        rig.fail(Fault.RESET, request, relayed=True)
    assert standings(rig) == {"a": "suspended", "b": "suspended"}
    receipt = rig.serve(session_id="s")
    assert (receipt.chosen_worker, receipt.route_reason) == ("a", RouteReason.STICKY_BOUND)


@pytest.mark.covers("S26")
def test_a_stuck_engine_is_suspended_although_its_probes_answer_and_comes_back_by_a_trial():
    rig = Rig(policy="round_robin", health_failures=2)
    rig.join("a", "b")
    sent = {"a": 0, "b": 0}
    for _ in range(60):
        rig.step(ProbeAnswered(rig.live_id("a"), ok=True))
        worker = rig.ask(text(1))
        sent[worker] += 1
        rig.accept()
        if worker == "a":
            rig.now += 2.0
            rig.fail(Fault.FIRST_BYTE_TIMEOUT)
            rig.accept(attempt=2)
        rig.finish()
    assert sent["a"] < 10 and sent["b"] > 50
    assert Report("worker_suspended", "a", "first_byte_timeout") in rig.effects
    rig.now += 31.0
    while rig.ask(text(1)) != "a":
        rig.finish()
    assert {rig.ask(text(1)) for _ in range(4)} == {"b"}, "one trial at a time"
    rig.finish("r" + str(rig._requests - 4))
    assert Report("worker_recovered", "a", "a request ended well") in rig.effects
    assert {rig.ask(text(1)) for _ in range(4)} == {"a", "b"}


@pytest.mark.covers("S26")
def test_a_stuck_engine_is_found_out_by_clients_that_do_not_wait_for_our_deadlines():
    rig = Rig(policy="round_robin", health_failures=2)
    rig.join("a")
    for _ in range(2):
        rig.arrive(text(1))
        rig.accept()
        rig.now += 12.0
        rig.step(ClientLeft(rig.last))
    assert standings(rig) == {"a": "suspended"}


@pytest.mark.covers("DR-02")
def test_an_outage_of_everybody_costs_no_more_attempts_than_the_budget_allows():
    rig = Rig(policy="round_robin", health_failures=2, retry_attempts=3, retry_budget_ratio=0.2)
    rig.join("a", "b", "c", "d")
    requests = 500
    for _ in range(requests):
        rig.arrive(text(1))
        attempt = 1
        while any(isinstance(effect, Dispatch) for effect in rig.fail(Fault.RESET, attempt=attempt)):
            attempt += 1
    attempts = sum(len(receipt.attempts) for receipt in rig.receipts)
    assert len(rig.receipts) == requests
    assert requests < attempts <= requests * 1.2 + 100 + rig.now


@pytest.mark.covers("S26")
def test_what_is_under_way_on_a_worker_that_is_gone_is_hastened_once():
    """A process that is shut down may keep its connections open for ever, and say nothing."""
    rig = Rig(policy="round_robin", health_failures=2)
    rig.join("a", "b")
    for name in ("r1", "r2", "r3"):
        rig.ask(text(1), request_id=name)
    rig.accept("r3")
    gone = rig.live_id("a")
    assert rig.step(ProbeAnswered(gone, ok=False)) == ()
    assert [effect for effect in rig.step(ProbeAnswered(gone, ok=False)) if isinstance(effect, Hasten)] == [
        Hasten("r1", 1),
        Hasten("r3", 1),
    ]
    assert rig.step(ProbeAnswered(gone, ok=False)) == ()
    rig.join("a", incarnation="2")
    assert [effect for effect in rig.effects[-6:] if isinstance(effect, Hasten)] == [Hasten("r1", 1), Hasten("r3", 1)]
    assert rig.finish("r3").status is Status.OK, "what still comes is welcome"
