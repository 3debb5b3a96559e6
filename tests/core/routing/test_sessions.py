"""Sessions through the router: what binds them, what breaks a binding, what a closed one can still do."""

from __future__ import annotations

import pytest

from kvrelay.core.model.effects import PassThrough, WakeAt
from kvrelay.core.model.events import (
    ClientLeft,
    FirstTokenSeen,
    PolicyChanged,
    ProbeAnswered,
    RequestFinished,
    SessionClosed,
    WokeUp,
    WorkerDrained,
    WorkerResumed,
)
from kvrelay.core.model.prompt import Tenant
from kvrelay.core.model.units import FallbackReason, Fault, RouteReason, Status
from tests.core.routing.rig import Rig, chosen


@pytest.fixture
def rig():
    rig = Rig(policy="sticky")
    rig.join("a", "b")
    return rig


def homes(rig: Rig) -> dict[str, str]:
    return {key.session_id: home.worker.name for key, home in rig.router.sessions().items()}


# --- binding -----------------------------------------------------------------------------------------------------


@pytest.mark.covers("RT-05")
def test_a_worker_that_refuses_the_connection_gets_no_binding(rig):
    assert rig.ask(session_id="s") == "a"
    assert homes(rig) == {}
    assert chosen(rig.fail(Fault.CONNECT)) == "b"
    rig.accept(attempt=2)
    rig.finish()
    assert homes(rig) == {"s": "b"}
    assert rig.serve(session_id="s").chosen_worker == "b"


def test_two_tenants_may_use_one_session_id_and_have_two_sessions(rig):
    ours, theirs = Tenant("ours"), Tenant("theirs")
    assert rig.serve(session_id="s", tenant=ours).chosen_worker == "a"
    assert rig.serve(session_id="s", tenant=theirs).chosen_worker == "b"
    assert {key: home.worker.name for key, home in rig.router.sessions().items()} == {
        ("s", "ours"): "a",
        ("s", "theirs"): "b",
    }
    rig.step(SessionClosed("s", tenant="theirs"))
    assert list(rig.router.sessions()) == [("s", "ours")]
    assert rig.router.has_session(rig.now, "s") and not rig.router.has_session(rig.now, "s", "theirs")
    rig.serve(session_id="s", tenant=theirs)
    rig.step(SessionClosed("s"))
    assert rig.router.sessions() == {}, "without a tenant it is closed for all"


@pytest.mark.covers("S32")
def test_eight_turns_at_once_make_one_binding(rig):
    assert {rig.ask(session_id="s") for _ in range(8)} == {"a"}
    for number in range(1, 9):
        rig.accept(f"r{number}")
    assert homes(rig) == {"s": "a"}


@pytest.mark.covers("S32")
def test_when_the_first_of_eight_turns_hangs_the_others_bind_and_its_failure_changes_nothing(rig):
    for _ in range(8):
        rig.ask(session_id="s")
    for number in range(1, 9):
        rig.accept(f"r{number}")
    for number in range(2, 9):
        assert rig.finish(f"r{number}").chosen_worker == "a"
    effects = rig.fail(Fault.FIRST_BYTE_TIMEOUT, "r1")
    assert chosen(effects) == "b"
    rig.accept("r1", attempt=2)
    assert rig.finish("r1").chosen_worker == "b" and homes(rig) == {"s": "a"}
    assert rig.serve(session_id="s").chosen_worker == "a"


@pytest.mark.covers("S32")
def test_when_the_first_of_eight_turns_cannot_connect_all_settle_on_one_worker(rig):
    for _ in range(8):
        rig.ask(session_id="s")
    for number in range(1, 9):
        assert chosen(rig.fail(Fault.CONNECT, f"r{number}")) == "b"
    for number in range(1, 9):
        rig.accept(f"r{number}", attempt=2)
    assert homes(rig) == {"s": "b"}


@pytest.mark.covers("S32")
def test_a_client_that_leaves_before_its_worker_took_the_turn_binds_nothing(rig):
    rig.arrive(session_id="s")
    rig.step(ClientLeft("r1"))
    assert not rig.router.has_session(rig.now, "s")
    assert rig.serve(session_id="s").route_reason is RouteReason.STICKY_FIRST


def test_a_session_returns_to_its_rank():
    rig = Rig(policy="sticky")
    rig.join("a", ranks=2)
    ranks = {session: rig.serve(session_id=session).rank for session in "st"}
    assert ranks == {"s": 0, "t": 1}
    assert {session: rig.serve(session_id=session).rank for session in "ts"} == ranks


@pytest.mark.covers("RT-07")
def test_a_binding_ends_after_idle_time_and_the_count_falls_to_zero():
    rig = Rig(policy="sticky", affinity_ttl_s=300.0)
    rig.join("a", "b")
    rig.now = 10.0
    rig.step(WokeUp())
    rig.serve(session_id="s")
    due = max(effect.at for effect in rig.effects if isinstance(effect, WakeAt))
    assert due == pytest.approx(310.0, abs=0.1) and rig.router.status(rig.now).sessions == 1
    rig.now = due
    rig.step(WokeUp())
    assert rig.router.status(rig.now).sessions == 0
    assert rig.serve(session_id="s").route_reason is RouteReason.STICKY_FIRST


@pytest.mark.covers("RT-07")
def test_a_turn_that_takes_longer_than_the_time_to_live_keeps_its_session():
    rig = Rig(policy="sticky", affinity_ttl_s=5.0)
    rig.join("a", "b")
    rig.arrive(session_id="s")
    rig.accept()
    rig.step(FirstTokenSeen("r1"))
    rig.now += 60.0
    rig.step(WokeUp())
    rig.step(RequestFinished("r1", 200))
    assert rig.serve(session_id="s").route_reason is RouteReason.STICKY_BOUND


# --- what breaks a binding ---------------------------------------------------------------------------------------


@pytest.mark.covers("RT-21", "DR-01")
def test_health_beats_affinity():
    rig = Rig(policy="sticky", health_failures=1)
    rig.join("a", "b")
    assert rig.serve(session_id="s").chosen_worker == "a"
    rig.step(ProbeAnswered(rig.live_id("a"), ok=False))
    receipt = rig.serve(session_id="s")
    assert (receipt.chosen_worker, receipt.route_reason) == ("b", RouteReason.AFFINITY_BROKEN_UNHEALTHY)
    assert receipt.fallback_reason is FallbackReason.AFFINITY_BROKEN
    rig.step(ProbeAnswered(rig.live_id("a"), ok=True))
    assert rig.serve(session_id="s").chosen_worker == "b", "rebound, and not moved back by the recovery"


@pytest.mark.covers("RT-21", "RT-22")
@pytest.mark.parametrize("how", ["removed", "started anew"])
def test_a_session_whose_worker_is_gone_is_bound_anew_and_the_receipt_says_why(rig, how):
    rig.serve(session_id="s")
    if how == "removed":
        rig.leave("a")
    else:
        rig.join("a", incarnation="2")
    assert homes(rig) == {} and rig.router.status(rig.now).sessions == 0
    first, second = rig.serve(session_id="s"), rig.serve(session_id="s")
    assert (first.route_reason, first.fallback_reason) == (
        RouteReason.AFFINITY_BROKEN_LOST,
        FallbackReason.AFFINITY_BROKEN,
    )
    assert (second.chosen_worker, second.route_reason) == (first.chosen_worker, RouteReason.STICKY_BOUND)


def test_a_session_whose_worker_is_gone_is_forgotten_in_time():
    rig = Rig(policy="sticky", affinity_ttl_s=5.0)
    rig.join("a", "b")
    rig.serve(session_id="s")
    rig.leave("a")
    rig.now += 10.0
    rig.step(WokeUp())
    assert not rig.router.has_session(rig.now, "s")


def test_a_draining_worker_loses_its_sessions_with_a_reason_of_its_own(rig):
    rig.serve(session_id="s")
    rig.step(WorkerDrained("a"))
    assert rig.serve(session_id="s").route_reason is RouteReason.AFFINITY_BROKEN_UNAVAILABLE
    rig.step(WorkerResumed("a"))
    assert rig.serve(session_id="s").chosen_worker == "b"


@pytest.mark.covers("RT-06")
@pytest.mark.parametrize("fault", [Fault.BACK_PRESSURE, Fault.SERVER_ERROR])
def test_one_turn_that_its_worker_did_not_serve_is_an_excursion(rig, fault):
    rig.serve(session_id="s")
    rig.arrive(session_id="s")
    rig.accept()
    assert chosen(rig.fail(fault, http_status=503)) == "b"
    rig.accept(attempt=2)
    receipt = rig.finish()
    busy = fault is Fault.BACK_PRESSURE
    expected = RouteReason.AFFINITY_BROKEN_BUSY if busy else RouteReason.AFFINITY_BROKEN_UNAVAILABLE
    assert (receipt.route_reason, receipt.chosen_worker) == (expected, "b")
    rig.now += 2.0
    assert rig.serve(session_id="s").chosen_worker == "a"


def test_a_worker_at_its_limit_keeps_its_sessions():
    rig = Rig(policy="sticky")
    rig.join("a", "b", max_active_requests=1)
    rig.serve(session_id="s")
    rig.arrive(session_id="s")
    rig.accept()
    receipt = rig.serve(session_id="s")
    assert (receipt.chosen_worker, receipt.route_reason) == ("b", RouteReason.AFFINITY_BROKEN_BUSY)
    rig.finish("r2")
    assert rig.serve(session_id="s").chosen_worker == "a"


# --- hard affinity -----------------------------------------------------------------------------------------------


def test_with_hard_affinity_a_turn_is_refused_rather_than_moved():
    rig = Rig(policy="sticky", affinity_hard=True)
    rig.join("a", "b")
    rig.serve(session_id="s")
    rig.step(WorkerDrained("a"))
    refusal = rig.arrive(session_id="s")[0]
    assert refusal.reason == "affinity_hard_unavailable" and rig.load("b") == [0, 0, 0]
    rig.step(WorkerResumed("a"))
    assert rig.serve(session_id="s").chosen_worker == "a"


def test_with_hard_affinity_the_workers_own_refusal_is_the_answer():
    rig = Rig(policy="sticky", affinity_hard=True)
    rig.join("a", "b")
    rig.serve(session_id="s")
    rig.arrive(session_id="s")
    rig.accept()
    assert rig.fail(Fault.BACK_PRESSURE, http_status=429, retry_after_s=2.0)[0] == PassThrough(rig.last)
    receipt = rig.receipts[-1]
    assert (receipt.status, len(receipt.attempts), receipt.not_retried_because) == (Status.REFUSED, 1, "affinity_hard")


def test_with_hard_affinity_a_first_turn_may_still_be_tried_elsewhere():
    rig = Rig(policy="sticky", affinity_hard=True)
    rig.join("a", "b")
    rig.arrive(session_id="s")
    rig.accept()
    assert chosen(rig.fail(Fault.SERVER_ERROR, http_status=500)) == "b"
    rig.accept(attempt=2)
    rig.finish()
    assert homes(rig) == {"s": "b"}


def test_with_hard_affinity_a_worker_that_is_gone_for_good_frees_its_sessions():
    rig = Rig(policy="sticky", affinity_hard=True)
    rig.join("a", "b")
    rig.serve(session_id="s")
    rig.leave("a")
    assert rig.serve(session_id="s").route_reason is RouteReason.AFFINITY_BROKEN_LOST


# --- closing -----------------------------------------------------------------------------------------------------


@pytest.mark.covers("SG-22", "DR-11")
def test_a_closed_session_starts_anew(rig):
    rig.serve(session_id="s")
    rig.step(SessionClosed("s"))
    receipt = rig.serve(session_id="s")
    assert (receipt.chosen_worker, receipt.route_reason) == ("b", RouteReason.STICKY_FIRST)


@pytest.mark.covers("SG-22", "DR-11")
@pytest.mark.parametrize("late", ["acceptance", "retry"])
def test_a_turn_that_is_under_way_when_its_session_is_closed_binds_nothing(rig, late):
    rig.arrive(session_id="s")
    assert rig.router.has_session(rig.now, "s")
    rig.step(SessionClosed("s"))
    if late == "acceptance":
        rig.accept()
    else:
        assert chosen(rig.fail(Fault.RESET)) == "b"
        rig.accept(attempt=2)
    assert rig.finish().status is Status.OK
    assert homes(rig) == {} and not rig.router.has_session(rig.now, "s")


@pytest.mark.covers("SG-22")
def test_a_turn_that_waits_for_a_place_when_its_session_is_closed_binds_nothing():
    rig = Rig(policy="sticky", queue_depth=4)
    rig.join("a", max_active_requests=1)
    rig.arrive()
    rig.arrive(session_id="s")
    rig.step(SessionClosed("s"))
    assert chosen(rig.step(ClientLeft("r1"))) == "a"
    rig.accept("r2")
    assert rig.finish("r2").status is Status.OK and homes(rig) == {}


def test_bindings_outlive_another_policy_but_not_their_time(rig):
    rig.serve(session_id="s")
    rig.step(PolicyChanged("round_robin"))
    assert [rig.serve(session_id="s").chosen_worker for _ in range(2)] == ["a", "b"]
    rig.step(PolicyChanged("sticky"))
    assert rig.serve(session_id="s").route_reason is RouteReason.STICKY_BOUND
