"""The live gateway's code and the simulated world give the same receipts for the same requests."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace
from tests.lab.sim.fleet import prompts, setups
from tests.lab.sim.live import LiveWorld
from tests.lab.sim.virtual_loop import run_virtually

from kvrelay.core.model.units import Status
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.edge.gateway.auth import Tenants
from kvrelay.lab.sim.world import SimRequest, World

SETTINGS = RouterSettings(key_seed=b"both")
TENANTS = Tenants({}, secret=b"the same for both fingerprints..")


def play(world: World | LiveWorld, seed: int, count: int) -> None:
    """Sessions under Poisson arrivals; some clients leave, one worker dies and comes back."""
    chance = random.Random(f"{seed}/play")
    at_s = 0.5
    for number, tokens in enumerate(prompts(seed, count, most_tokens=300)):
        at_s += chance.expovariate(25.0)
        request = SimRequest(
            request_id=f"r{number}",
            token_ids=tokens,
            max_tokens=chance.randrange(1, 8),
            session_id=f"s{chance.randrange(40)}",
            model="mock-model",
            tenant=TENANTS.of(None),
        )
        world.submit(at_s, request)
        if chance.random() < 0.02:
            world.leave(at_s + chance.uniform(0.0, 0.1), request.request_id)
    world.at(at_s * 0.4, lambda: world.kill("w1"))
    world.at(at_s * 0.5, lambda: world.restart("w1"))


def simulated(seed: int, count: int) -> list[Receipt]:
    world = World(setups(), settings=SETTINGS, seed=seed)
    play(world, seed, count)
    world.run()
    return world.receipts


def live(seed: int, count: int) -> list[Receipt]:
    found: list[Receipt] = []

    async def run() -> None:
        world = LiveWorld(setups(), settings=SETTINGS, seed=seed, tenants=TENANTS)
        play(world, seed, count)
        found.extend(await world.run())

    run_virtually(run())
    return found


def same_receipts(seed: int, count: int) -> list[Receipt]:
    """All members but one: how long the decision took is measured with a real clock, and the simulator has none."""
    expected = simulated(seed, count)
    got = [replace(receipt, decision_us=None) for receipt in live(seed, count)]
    assert [receipt.request_id for receipt in got] == [receipt.request_id for receipt in expected]
    for ours, theirs in zip(expected, got, strict=True):
        assert ours == theirs
    return expected


@pytest.mark.covers("SM-06", "SM-07")
def test_the_live_gateway_and_the_simulator_write_the_same_receipts():
    receipts = same_receipts(seed=5, count=400)
    statuses = {receipt.status for receipt in receipts}
    assert {Status.OK, Status.CLIENT_CANCELLED} <= statuses
    assert any(len(receipt.attempts) > 1 for receipt in receipts), "a worker died"
    assert any(receipt.actual_cached_tokens for receipt in receipts)
