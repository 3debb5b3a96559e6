"""Expiry, failure and distance each leave a name in the receipt: what the request fell back to, and why."""

from __future__ import annotations

import numpy as np
import pytest
from tests.lab.sim.fleet import setups

from kvrelay.core.model.events import EventsHeard
from kvrelay.core.model.units import FallbackReason, Fault, RouteReason, Status
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.lab.sim.attempt import HostTimes
from kvrelay.lab.sim.weather import Carried, Weather
from kvrelay.lab.sim.world import SimRequest, World

TOKENS = np.arange(300, dtype=np.uint32)


def two_turns(policy: str, between, *, weather: Weather | None = None, times: HostTimes = HostTimes()) -> Receipt:
    """One session over two workers; `between(world, home)` happens between its turns. The second turn's receipt."""
    world = World(setups(2), settings=RouterSettings(policy=policy), weather=weather, times=times)
    world.submit(0.0, SimRequest(request_id="first", token_ids=TOKENS[:200], session_id="s"))
    world.run()
    between(world, world.receipts[0].chosen_worker)
    world.submit(world.now_s + 10, SimRequest(request_id="second", token_ids=TOKENS, session_id="s"))
    world.run()
    assert world.receipts[1].status is Status.OK
    return world.receipts[1]


@pytest.mark.covers("RT-26")
def test_a_cache_that_expired_with_its_process_breaks_the_affinity():
    receipt = two_turns("sticky", lambda world, home: world.restart(home))
    assert receipt.fallback_reason is FallbackReason.AFFINITY_BROKEN
    assert receipt.route_reason is RouteReason.AFFINITY_BROKEN_LOST


@pytest.mark.covers("RT-26")
def test_an_index_that_is_out_of_date_for_good_is_not_used():
    def silence(world: World, home: str) -> None:
        for worker in world.workers.values():
            world.feed(EventsHeard(worker.life.id, "no events for a minute, though it computed"))

    receipt = two_turns("cache_load", silence)
    assert receipt.fallback_reason is FallbackReason.INDEX_UNUSABLE


@pytest.mark.covers("RT-26")
def test_a_worker_that_fails_is_replaced_for_this_request():
    receipt = two_turns("cache_load", lambda world, home: world.at(world.now_s + 10, lambda: world.kill(home)))
    assert receipt.fallback_reason is FallbackReason.RETRIED_ELSEWHERE
    assert receipt.attempts[0].fault is Fault.CONNECT


class FarAway(Weather):
    """Answers of one worker come from another region, from some moment on."""

    def __init__(self) -> None:
        self.far: str | None = None

    def attempt(self, now_s, dispatch):
        return Carried(0.15, 3.0) if dispatch.worker.name == self.far else Carried()


@pytest.mark.covers("RT-26")
def test_an_answer_from_too_far_away_is_fetched_from_nearer():
    weather = FarAway()

    def move(world: World, home: str) -> None:
        weather.far = home

    receipt = two_turns("cache_load", move, weather=weather, times=HostTimes(first_byte_s=1.0))
    assert receipt.fallback_reason is FallbackReason.RETRIED_ELSEWHERE
    assert receipt.attempts[0].fault is Fault.FIRST_BYTE_TIMEOUT
    assert receipt.attempts[1].worker != receipt.attempts[0].worker
