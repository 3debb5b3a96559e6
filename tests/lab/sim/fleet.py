"""A small seeded fleet with traffic, as the tests of the simulated world use it."""

from __future__ import annotations

import random

import numpy as np

from kvrelay.core.engine.engine import EngineSettings
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.lab.sim.world import SimRequest, WorkerSetup, World

SIZE = 16


def setups(count: int = 3, *, blocks: int = 128, **more) -> list[WorkerSetup]:
    engine = EngineSettings(blocks=blocks, max_model_len=1024, block_size_tokens=SIZE)
    return [WorkerSetup(name=f"w{i}", engine=engine, **more) for i in range(count)]


def prompts(seed: int, count: int, *, families: int = 8, most_tokens: int = 600) -> list[np.ndarray]:
    """Prefixes of a few texts: longer and shorter ones, so that they share and evict."""
    chance = random.Random(f"{seed}/prompts")
    texts = [np.frombuffer(chance.randbytes(4 * most_tokens), dtype=np.uint32) % 50_000 for _ in range(families)]
    return [texts[chance.randrange(families)][: chance.randrange(SIZE, most_tokens)] for _ in range(count)]


def fill(world: World, seed: int, count: int = 100, *, per_s: float = 20.0, **shape) -> None:
    """Poisson arrivals of sessions' turns."""
    chance = random.Random(f"{seed}/arrivals")
    at_s = 0.0
    for i, tokens in enumerate(prompts(seed, count, **shape)):
        at_s += chance.expovariate(per_s)
        request = SimRequest(
            request_id=f"r{i}",
            token_ids=tokens,
            max_tokens=chance.randrange(1, 8),
            session_id=f"s{chance.randrange(10)}",
        )
        world.submit(at_s, request)


def run(seed: int = 0, count: int = 100, **more) -> World:
    world = World(setups(), settings=RouterSettings(key_seed=b"test"), seed=seed, **more)
    fill(world, seed, count)
    world.run()
    world.check()
    return world
