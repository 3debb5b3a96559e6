"""The admission queue, alone and in the router: bounded, by priority, fair between tenants, honest about waits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.core.model.effects import Refuse
from kvrelay.core.model.events import AttemptFailed, ClientLeft, FirstTokenSeen, ProbeAnswered, WokeUp
from kvrelay.core.model.prompt import Tenant
from kvrelay.core.model.units import Fault, Status
from kvrelay.core.routing.admission import AdmissionQueue, Futile, Queued
from kvrelay.core.routing.capacity import Capacity
from tests.core.routing.rig import Rig, chosen, text


def queue_of(*entries, depth=10):
    queue = AdmissionQueue(depth=depth, wait_s=30.0)
    for name, tenant, priority in entries:
        assert queue.join(0.0, name, tenant=tenant, priority=priority) == Queued()
    return queue


def serve_all(queue):
    order = []
    while len(queue):
        order.append(next(queue.in_turn()))
        queue.served(order[-1])
    return order


def test_tenants_take_turns_within_a_priority():
    queue = queue_of(("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0), ("b1", "b", 0), ("c1", "c", 0))
    assert list(queue.in_turn()) == ["a1", "b1", "c1", "a2", "a3"] == serve_all(queue)


def test_higher_priority_goes_first():
    queue = queue_of(("low", "a", 0), ("high", "a", 5), ("mid", "b", 3))
    assert serve_all(queue) == ["high", "mid", "low"]


def test_a_full_queue_refuses_equals_and_gives_way_to_the_more_urgent():
    queue = queue_of(("a", "t", 0), ("b", "t", 1), ("c", "t", 0), depth=3)
    assert queue.join(0.0, "d", tenant="t", priority=0) == Futile("queue_full", 1.0)
    assert queue.join(0.0, "e", tenant="t", priority=1) == Queued(displaced="c")
    assert serve_all(queue) == ["b", "e", "a"]


def test_a_wait_that_would_be_too_long_is_refused_at_once_with_the_time_it_would_take():
    queue = AdmissionQueue(depth=100, wait_s=5.0)
    queue.join(0.0, "first", tenant="t", priority=0)
    for second in range(10):
        queue.place_freed(float(second))
    outcomes = [queue.join(10.0, str(i), tenant="t", priority=0) for i in range(7)]
    assert outcomes == [Queued()] * 5 + [Futile("queue_too_slow", 6.0)] * 2
    assert queue.join(10.0, "urgent", tenant="t", priority=1) == Queued()


def test_how_seldom_requests_end_on_an_idle_fleet_makes_no_wait_futile():
    queue = AdmissionQueue(depth=100, wait_s=5.0)
    for minute in range(10):
        queue.place_freed(60.0 * minute)
    assert [queue.join(600.0, str(i), tenant="t", priority=0) for i in range(8)] == [Queued()] * 8


def test_waiting_ends_after_its_time():
    queue = queue_of(("a", "t", 0), ("b", "t", 1))
    assert queue.next_deadline() == 30.0 and queue.expired(29.9) == [] and queue.expired(30.0) == ["a", "b"]


def test_a_request_waits_no_longer_than_is_of_use_to_it():
    queue = queue_of(("a", "t", 0))
    assert queue.join(1.0, "b", tenant="t", priority=0, until=3.0) == Queued()
    assert queue.join(1.0, "c", tenant="t", priority=0, until=1.0) == Futile("deadline_unreachable", 1.0)
    queue.change(depth=10, wait_s=60.0)
    assert queue.next_deadline() == 3.0 and queue.expired(3.0) == ["b"], "its own time is not the operator's"
    queue.leave("b")
    assert queue.next_deadline() == 60.0


def test_an_id_that_comes_back_has_its_own_time():
    queue = queue_of()
    queue.join(0.0, "a", tenant="t", priority=0, until=1.0)
    queue.leave("a")
    queue.join(0.5, "a", tenant="t", priority=0)
    assert queue.expired(1.0) == [] and queue.next_deadline() == 30.5


class NaiveQueue(RuleBasedStateMachine):
    """A plain list in order of arrival, the turns of tenants per priority, and when each has waited long enough."""

    def __init__(self):
        super().__init__()
        self.queue = AdmissionQueue(depth=5, wait_s=10.0)
        self.model: list[tuple[str, str, int]] = []
        self.until: dict[str, float] = {}
        self.number = 0
        self.now = 0.0

    @rule(
        tenant=st.sampled_from("abc"), priority=st.integers(0, 2), own_s=st.sampled_from((None, None, 0.5, 3.0, 40.0))
    )
    def join(self, tenant, priority, own_s):
        self.number += 1
        name = str(self.number)
        outcome = self.queue.join(
            self.now, name, tenant=tenant, priority=priority, until=None if own_s is None else self.now + own_s
        )
        self.until[name] = self.now + min(10.0, own_s or 10.0)
        if len(self.model) >= 5:
            lowest = min(p for _, _, p in self.model)
            if lowest >= priority:
                assert isinstance(outcome, Futile)
                return
            victim = [entry for entry in self.model if entry[2] == lowest][-1]
            assert outcome == Queued(displaced=victim[0])
            self.model.remove(victim)
        self.model.append((name, tenant, priority))

    @rule(data=st.data())
    def leave(self, data):
        name = str(data.draw(st.integers(0, self.number)))
        known = [entry for entry in self.model if entry[0] == name]
        assert self.queue.leave(name) == bool(known)
        self.model = [entry for entry in self.model if entry[0] != name]

    @rule()
    def serve(self):
        if self.model:
            name = next(self.queue.in_turn())
            tenant, priority = next((t, p) for n, t, p in self.model if n == name)
            assert priority == max(p for _, _, p in self.model)
            assert name == next(n for n, t, p in self.model if (t, p) == (tenant, priority)), "first come, first served"
            self.queue.served(name)
            self.model = [entry for entry in self.model if entry[0] != name]

    @rule(seconds=st.sampled_from((0.1, 1.0, 4.0)))
    def time_passes(self, seconds):
        self.now += seconds
        over = {name for name, _, _ in self.model if self.until[name] <= self.now}
        expired = self.queue.expired(self.now)
        assert set(expired) == over and sorted(expired, key=self.until.__getitem__) == expired
        for name in expired:
            self.queue.leave(name)
        self.model = [entry for entry in self.model if entry[0] not in over]

    @invariant()
    def agrees(self):
        deadlines = [self.until[name] for name, _, _ in self.model]
        assert self.queue.next_deadline() == min(deadlines, default=None)
        self.queue.check()
        assert sorted(self.queue.in_turn()) == sorted(name for name, _, _ in self.model)


NaiveQueue.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class TestAgainstANaiveModel(NaiveQueue.TestCase):
    pass


# --- in the router -----------------------------------------------------------------------------------------------


@pytest.fixture
def busy():
    """Two workers with one place each, both taken by r1 and r2."""
    rig = Rig(policy="round_robin", queue_depth=3, queue_wait_s=30.0)
    rig.join("a", "b", max_active_requests=1)
    assert [rig.ask(text(1)), rig.ask(text(1))] == ["a", "b"]
    return rig


def test_a_request_waits_for_a_place_and_says_how_long(busy):
    assert busy.ask(text(2), request_id="w") is None and busy.router.status(busy.now).queue_depth == 1
    busy.now += 2.0
    busy.finish("r2")
    busy.accept("w")
    receipt = busy.finish("w")
    assert receipt.chosen_worker == "b" and receipt.router_queue_ms == pytest.approx(2_000, abs=10)
    assert busy.finish("r1").router_queue_ms == 0.0 and busy.router.status(busy.now).queue_depth == 0


def test_every_place_is_given_to_exactly_one_of_those_who_wait(busy):
    for i in range(3):
        assert busy.ask(text(2), request_id=f"w{i}") is None
    busy.finish("r1")
    assert busy.router.status(busy.now).queue_depth == 2 and busy.load("a")[0] == busy.load("b")[0] == 1


def test_a_long_prefill_counts_as_several_requests_until_its_first_token():
    rig = Rig(policy="round_robin", queue_depth=3, capacity=Capacity(prefill_weight=100.0))
    rig.join("a", max_active_requests=4)
    assert rig.ask(text(1, blocks=10), request_id="long") == "a", "an idle worker takes any request"
    assert rig.ask(text(2), request_id="short") is None
    served = rig.step(FirstTokenSeen("long"))
    assert chosen(served) == "a", "the place is free with the first token, not with the last"
    rig.router.check()


def test_long_contexts_that_generate_fill_a_worker():
    rig = Rig(policy="round_robin", capacity=Capacity(decode_weight=1_000.0))
    rig.join("a", "b", max_active_requests=8)
    assert [rig.ask(text(1, blocks=10), request_id=name) for name in ("r1", "r2")] == ["a", "b"]
    rig.step(FirstTokenSeen("r1"))
    assert [rig.ask(text(2)), rig.ask(text(3))] == ["b", "b"], "a has eleven blocks, which are as many requests"


def test_a_full_queue_refuses_early_with_a_hint(busy):
    for i in range(3):
        busy.ask(text(2), request_id=f"w{i}")
    refusal = busy.arrive(text(2), request_id="late")[0]
    assert (refusal.http_status, refusal.reason) == (503, "queue_full") and refusal.retry_after_s >= 1
    effects = busy.arrive(text(2), request_id="urgent", priority=5)
    assert effects[0] == Refuse("w2", 503, "queue_displaced", 1.0)
    assert [r.request_id for r in busy.receipts] == ["late", "w2"]
    assert {r.status for r in busy.receipts} == {Status.REFUSED}


def test_who_leaves_or_runs_out_of_time_while_waiting_has_one_receipt_and_no_place(busy):
    for name in ("gone", "old", "timed_out"):
        busy.ask(text(2), request_id=name)
    busy.step(ClientLeft("gone"))
    refusal = busy.step(AttemptFailed("timed_out", 0, Fault.TOTAL_TIMEOUT))[0]
    assert (refusal.http_status, refusal.reason) == (504, "total_timeout")
    busy.now += 31.0
    busy.step(WokeUp())
    assert [(r.request_id, r.status, r.failure_reason) for r in busy.receipts] == [
        ("gone", Status.CLIENT_CANCELLED, None),
        ("timed_out", Status.TIMEOUT, "total_timeout"),
        ("old", Status.REFUSED, "queue_wait_over"),
    ]
    busy.finish("r1")
    assert busy.load("a") == [0, 0, 0]


def test_waiting_requests_are_refused_when_nobody_is_left_to_serve_them(busy):
    busy.ask(text(2), request_id="w")
    for name in ("a", "b"):
        for _ in range(2):
            busy.step(ProbeAnswered(busy.live_id(name), ok=False))
    assert busy.receipts[-1].failure_reason == "no_worker_alive"


def test_a_model_without_a_free_worker_does_not_hold_up_others():
    rig = Rig(policy="round_robin", queue_depth=5)
    rig.join("a", max_active_requests=1, models=("m",))
    rig.join("b", max_active_requests=1, models=("n",))
    rig.ask(text(1), model="m")
    rig.ask(text(1), model="n")
    rig.ask(text(1), model="m", request_id="wm")
    rig.ask(text(1), model="n", request_id="wn")
    assert chosen(rig.step(ClientLeft("r2"))) == "b" and rig.router.status(rig.now).queue_depth == 1


def test_a_flood_of_one_tenant_does_not_starve_another():
    rig = Rig(policy="round_robin", queue_depth=50)
    rig.join("a", max_active_requests=1)
    rig.arrive(text(1), request_id="first")
    for i in range(20):
        rig.arrive(text(1), request_id=f"flood{i}", tenant=Tenant("loud"))
    for i in range(3):
        rig.arrive(text(1), request_id=f"quiet{i}", tenant=Tenant("quiet"))
    served, current = [], "first"
    for _ in range(8):
        effects_before = len(rig.effects)
        rig.finish(current)
        current = next(e.request_id for e in rig.effects[effects_before:] if type(e).__name__ == "Dispatch")
        served.append(current[:5])
    assert Counter(served)["quiet"] == 3


def test_without_a_queue_a_full_fleet_refuses_at_once():
    rig = Rig(policy="round_robin")
    rig.join("a", max_active_requests=1)
    rig.arrive(text(1))
    assert rig.arrive(text(1))[0] == Refuse("r2", 503, "at_capacity", 1.0)
