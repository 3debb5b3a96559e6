"""The simulated fleet: same seed, same bytes; nothing lost; and an index that comes back to the truth."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.lab.sim.fleet import SIZE, fill, prompts, run, setups

from kvrelay.core.model.effects import Dispatch
from kvrelay.core.model.events import AttemptAccepted, FirstTokenSeen, RequestArrived, RequestFinished, ResidencyReset
from kvrelay.core.model.prompt import Prompt
from kvrelay.core.model.units import FallbackReason, Fault, IndexState, Status
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.lab.sim.attempt import HostTimes
from kvrelay.lab.sim.weather import BrokenOff, Carried, EventWeather, Refused, Silent, Weather
from kvrelay.lab.sim.world import SimRequest, World

TOKENS = np.arange(200, dtype=np.uint32)


def request(name: str = "r", tokens: np.ndarray = TOKENS, **more) -> SimRequest:
    return SimRequest(request_id=name, token_ids=tokens, **{"max_tokens": 4, **more})


class Once(Weather):
    """The first attempt meets this fate."""

    def __init__(self, fate) -> None:
        self._fates = [fate]

    def attempt(self, now_s, dispatch):
        return self._fates.pop() if self._fates else Carried()


def test_every_request_has_one_receipt_and_nothing_stays_booked():
    world = run(seed=1)
    assert sorted(receipt.request_id for receipt in world.receipts) == sorted(f"r{i}" for i in range(100))
    assert Counter(receipt.status for receipt in world.receipts) == {Status.OK: 100}
    assert all(target.active_requests == 0 for w in world.router.status(world.now_s).workers for target in w.targets)
    assert sum(receipt.actual_cached_tokens for receipt in world.receipts) > 0


def test_another_seed_is_another_run():
    assert run(seed=1).digest() == run(seed=1).digest() != run(seed=2).digest()


_PRINT_DIGEST = """
import random
from kvrelay.lab.sim.weather import EventWeather
from kvrelay.lab.sim.world import World
from kvrelay.core.routing.settings import RouterSettings
from tests.lab.sim.fleet import fill, setups
weather = EventWeather(random.Random(5).random, spread_s=0.05, loss=0.1, duplication=0.1)
world = World(setups(), settings=RouterSettings(key_seed=b"x", migrate=True), seed=3, weather=weather)
fill(world, 3, 150)
world.at(1.0, lambda: world.kill("w0"))
world.at(2.0, lambda: world.restart("w0"))
world.run()
print(world.digest())
"""


def test_the_same_seed_gives_the_same_receipts_under_any_hash_seed():
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _PRINT_DIGEST],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    digests = {process.communicate()[0] for process in running}
    assert len(digests) == 1 and len(digests.pop()) == 65


def test_a_prompt_that_was_computed_is_claimed_and_hit():
    world = World(setups(1))
    world.submit(0.0, request("a"))
    world.submit(1.0, request("b"))
    world.run()
    second = world.receipts[1]
    assert second.matched_tokens_at_route == second.actual_cached_tokens == 192
    assert world.cached_blocks("w0", TOKENS) == 12
    assert world.answers["a"].token_ids == world.answers["b"].token_ids, "a hit changes no text"


def test_a_killed_worker_breaks_its_streams_and_the_next_life_starts_empty():
    world = World(setups(1), settings=RouterSettings(retry_attempts=1))
    world.submit(0.0, request("before"))
    world.submit(1.0, request("during", np.arange(1000, 1900, dtype=np.uint32)))
    world.at(1.01, lambda: world.kill("w0"))
    world.at(3.0, lambda: world.restart("w0"))
    world.submit(6.0, request("after"))
    world.run()
    by_id = {receipt.request_id: receipt for receipt in world.receipts}
    assert by_id["during"].status is Status.WORKER_LOST
    assert by_id["during"].attempts[0].fault is Fault.RESET
    assert (by_id["after"].incarnation, by_id["after"].matched_tokens_at_route) == ("life-2", 0)
    assert by_id["after"].actual_cached_tokens == 0


@pytest.mark.parametrize("fate", [Refused(Fault.CONNECT), BrokenOff(0), Refused(Fault.SERVER_ERROR, http_status=500)])
def test_an_attempt_that_fails_unseen_is_tried_elsewhere(fate):
    world = World(setups(2), weather=Once(fate))
    world.submit(0.0, request())
    world.run()
    (receipt,) = world.receipts
    assert (receipt.status, receipt.fallback_reason) == (Status.OK, FallbackReason.RETRIED_ELSEWHERE)
    assert len({attempt.worker for attempt in receipt.attempts}) == 2
    assert len(world.answers["r"].token_ids) == 4


def test_a_stream_that_breaks_is_not_retried_but_may_migrate():
    undisturbed = World(setups(2))
    undisturbed.submit(0.0, request())
    undisturbed.run()
    broken = World(setups(2), weather=Once(BrokenOff(2)))
    broken.submit(0.0, request())
    broken.run()
    assert (broken.receipts[0].status, broken.answers["r"].ending) == (Status.WORKER_LOST, "broken_off")
    assert len(broken.answers["r"].token_ids) == 2
    migrated = World(setups(2), settings=RouterSettings(migrate=True), weather=Once(BrokenOff(2)))
    migrated.submit(0.0, request())
    migrated.run()
    assert (migrated.receipts[0].status, migrated.receipts[0].migrations) == (Status.OK, 1)
    assert migrated.answers["r"].token_ids == undisturbed.answers["r"].token_ids
    assert migrated.receipts[0].completion_tokens == 4


def test_silence_is_borne_for_as_long_as_the_timeouts_say():
    times = HostTimes(first_byte_s=5.0, idle_s=2.0)
    for after_tokens, fault, at_s in ((0, Fault.FIRST_BYTE_TIMEOUT, 5.0), (2, Fault.IDLE_TIMEOUT, 2.0)):
        world = World(
            setups(1), settings=RouterSettings(retry_attempts=1), weather=Once(Silent(after_tokens)), times=times
        )
        world.submit(0.0, request())
        world.run()
        assert world.receipts[0].attempts[0].fault is fault
        assert at_s <= world.now_s < at_s + 0.1
        world.run(until_s=world.now_s + 1)
        world.check()


def frozen_for(stand_still_s: float) -> World:
    world = World(setups(1), times=HostTimes(total_s=100.0))
    world.submit(0.0, request())
    world.at(0.001, lambda: world.freeze("w0"))
    world.at(stand_still_s, lambda: world.thaw("w0"))
    world.run()
    assert world.reports["worker_down"] == 1
    return world


def test_a_frozen_worker_answers_when_it_is_thawed_in_time():
    world = frozen_for(8.0)
    assert world.receipts[0].status is Status.OK and world.receipts[0].ttft_ms >= 8_000


def test_the_silence_of_a_worker_whose_probes_fail_is_borne_for_ten_seconds():
    world = frozen_for(20.0)
    assert world.receipts[0].status is Status.TIMEOUT
    assert 10.0 < world.now_s < 13.5


def test_a_request_that_nobody_ends_has_its_total_time():
    world = World(setups(1), times=HostTimes(total_s=3.0))
    world.submit(0.0, request())
    world.at(0.001, lambda: world.freeze("w0"))
    world.run()
    assert (world.receipts[0].status, world.now_s) == (Status.TIMEOUT, 3.0)


def test_a_client_that_leaves_frees_its_blocks():
    world = World(setups(1))
    world.submit(0.0, request(max_tokens=500))
    world.leave(0.1, "r")
    world.run()
    assert world.receipts[0].status is Status.CLIENT_CANCELLED
    world.run(until_s=1.0)
    world.check()  # the engine holds no block without a request


def test_the_same_workers_see_the_events_that_a_gateway_would():
    seen = []
    world = World(setups(1), observer=lambda now_s, event, effects: seen.append((type(event), effects)))
    world.submit(0.5, request())
    world.run()
    kinds = [kind for kind, _ in seen if kind in (RequestArrived, AttemptAccepted, FirstTokenSeen, RequestFinished)]
    assert kinds == [RequestArrived, AttemptAccepted, FirstTokenSeen, RequestFinished]
    assert any(isinstance(effect, Dispatch) for _, effects in seen for effect in effects)


def indexed_blocks(world: World, tokens: np.ndarray) -> dict[str, int]:
    """What the router believes of each worker, over full blocks."""
    keys = {size: world.router.keyer.prompt_keys(tokens, size) for size in world.router.block_sizes()}
    answer = world.router.match(world.now_s, RequestArrived("probe", Prompt(len(tokens) + 1, keys)))
    return {candidate.worker: sum(candidate.tiers.values()) // SIZE for candidate in answer.candidates}


@pytest.mark.parametrize("seed", range(4))
def test_after_lost_doubled_and_disordered_events_the_index_is_the_truth_again(seed):
    chance = random.Random(f"{seed}/events")
    weather = EventWeather(chance.random, spread_s=0.2, loss=0.2, duplication=0.2)
    world = World(setups(blocks=64), seed=seed, weather=weather)
    fill(world, seed, 60)
    world.run()
    weather.calm()
    for i, worker in enumerate(world.workers):  # a fresh batch from everybody shows the last gaps
        world.submit(world.now_s + i, request(f"last-{worker}", np.arange(i * 5000, i * 5000 + 100, dtype=np.uint32)))
    world.run()
    for name in world.workers:
        world.feed(ResidencyReset(name, replay=True))
    world.run(until_s=world.now_s + 5)
    states = {t.index_state for w in world.router.status(world.now_s).workers for t in w.targets}
    assert states == {IndexState.LIVE}
    for tokens in prompts(seed, 20):
        assert indexed_blocks(world, tokens) == {name: world.cached_blocks(name, tokens) for name in world.workers}
