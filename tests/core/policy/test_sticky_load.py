"""Sticky with spill: who stays, who goes, and that nobody moves for good."""

from __future__ import annotations

from collections import Counter

import pytest

from kvrelay.core.model.units import FallbackReason, Fault, RouteReason
from kvrelay.core.routing.settings import Spill
from tests.core.routing.rig import Rig, chosen


def rig_of(*names: str, ratio: float = 1.5, requests: int = 2, **settings) -> Rig:
    rig = Rig(policy="sticky_load", spill=Spill(ratio, requests), **settings)
    rig.join(*names)
    return rig


def occupy(rig: Rig, session: str, count: int) -> list[str]:
    """So many turns of a session that stay open; answers where they went."""
    workers = []
    for _ in range(count):
        workers.append(rig.ask(session_id=session))
        rig.accept()
    return workers


@pytest.mark.covers("RT-04", "RT-06")
def test_without_much_load_it_is_sticky():
    rig, control = rig_of("a", "b", "c"), Rig(policy="sticky")
    control.join("a", "b", "c")
    turns = [f"s{i}" for i in range(6)] * 3
    assert [rig.serve(session_id=s).chosen_worker for s in turns] == [
        control.serve(session_id=s).chosen_worker for s in turns
    ]


@pytest.mark.covers("RT-24", "RT-25")
def test_a_turn_spills_when_its_worker_is_too_busy_and_the_session_stays_bound():
    rig = rig_of("a", "b")
    assert rig.serve(session_id="s").chosen_worker == "a"
    assert occupy(rig, "s", 3) == ["a", "a", "a"], "3 requests there and none elsewhere is more than 1.5 x 0 + 2"
    rig.arrive(session_id="s")
    rig.accept()
    receipt = rig.finish()
    assert (receipt.chosen_worker, receipt.route_reason) == ("b", RouteReason.STICKY_SPILL)
    assert (receipt.spilled_from, receipt.fallback_reason) == ("a", FallbackReason.OVERLOADED_HOLDER)
    assert rig.router.spills == 1
    for number in (2, 3, 4):
        rig.finish(f"r{number}")
    receipt = rig.serve(session_id="s")
    assert (receipt.chosen_worker, receipt.route_reason, receipt.spilled_from) == ("a", RouteReason.STICKY_BOUND, None)


def test_the_limit_is_a_multiple_of_the_least_load_and_an_allowance():
    rig = rig_of("a", "b", ratio=2.0, requests=1)
    for session, worker in (("s", "a"), ("t", "b")):
        assert rig.serve(session_id=session).chosen_worker == worker
    assert occupy(rig, "t", 2) == ["b", "b"]
    assert occupy(rig, "s", 7) == ["a"] * 6 + ["b"], "6 is more than 2 x 2 + 1, 5 is not"


def test_repeated_spills_of_a_session_go_to_the_same_second_worker_while_it_can():
    rig = rig_of("a", "b", "c", requests=2)
    rig.serve(session_id="s")
    occupy(rig, "s", 3)
    draws = {rig.serve(session_id="s", draw=draw).chosen_worker for draw in range(8)}
    assert len(draws) == 1 and draws != {"a"}
    (second,) = draws
    assert Counter(occupy(rig, "s", 4)) == {second: 3, ({"b", "c"} - {second}).pop(): 1}, "until that one is too busy"


@pytest.mark.covers("S25")
def test_a_full_worker_spills_without_losing_its_session():
    rig = rig_of("a", "b")
    rig.serve(session_id="s")
    rig.arrive(session_id="s")
    rig.accept()
    assert chosen(rig.fail(Fault.BACK_PRESSURE, http_status=429)) == "b"
    rig.accept(attempt=2)
    receipt = rig.finish()
    assert (receipt.route_reason, receipt.spilled_from) == (RouteReason.STICKY_SPILL, "a")
    rig.now += 2.0
    assert rig.serve(session_id="s").chosen_worker == "a"


def test_a_first_turn_passes_over_a_worker_that_is_too_busy():
    rig = rig_of("a", "b")
    rig.serve(session_id="s")
    rig.serve(session_id="t")
    occupy(rig, "s", 3)
    receipt = rig.serve(session_id="new")
    assert (receipt.chosen_worker, receipt.route_reason, receipt.spilled_from) == ("b", RouteReason.STICKY_FIRST, None)
    assert rig.serve(session_id="new").chosen_worker == "b"


@pytest.mark.covers("RT-21")
def test_health_beats_affinity_here_as_well():
    rig = rig_of("a", "b")
    rig.serve(session_id="s")
    rig.leave("a")
    assert rig.serve(session_id="s").route_reason is RouteReason.AFFINITY_BROKEN_LOST


def test_under_hard_affinity_nothing_spills():
    rig = rig_of("a", "b", affinity_hard=True)
    rig.serve(session_id="s")
    assert occupy(rig, "s", 20) == ["a"] * 20


@pytest.mark.covers("RT-25")
def test_a_hot_session_does_not_queue_up_at_one_worker():
    rig, control = rig_of("a", "b", "c", "d"), Rig(policy="sticky")
    control.join("a", "b", "c", "d")
    for each in (rig, control):
        each.serve(session_id="s")
    spread, heap = Counter(occupy(rig, "s", 40)), Counter(occupy(control, "s", 40))
    assert heap == {"a": 40} and max(spread.values()) / 10 <= 2.0
