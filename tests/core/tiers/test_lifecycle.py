"""Random runs of the machine, none of which takes an illegal step: some here, ten thousand in
`tests/real/test_store_lifecycle.py`.

Among them are the seeds that found two writers of one key take back each other's pieces (207), a
tier evict what was being written (12), and bytes of one key counted for another (243, 1090).
"""

from __future__ import annotations

import random
from collections import Counter

from kvrelay.core.model.units import Tier
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.core.tiers.settings import TierSettings, TiersSettings
from tests.core.tiers.lifecycle import BACK, OUT, WatchedWorld
from tests.core.tiers.world import CHUNK_BYTES

RUNS, STEPS = 1100, 30
KEYS = tuple(bytes([n]) * 4 for n in range(4))
FAULTS = (Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.NO_SPACE, Outcome.PARTIAL)


def world_of(chance: random.Random) -> WatchedWorld:
    near = TierSettings(
        name="near",
        medium=Tier.CPU,
        capacity_bytes=chance.choice([None, 2 * CHUNK_BYTES]),
        promote=chance.choice(["always", "second_sight", "never"]),  # type: ignore[arg-type]
        max_fetches=2,
    )
    write = chance.choice(["through", "back", "selective"])
    far = TierSettings(name="far", medium=Tier.REMOTE, write=write, index=chance.random() < 0.5, max_writes=2)  # type: ignore[arg-type]
    policy = chance.choice(["recompute", "fail", "fallback"])
    settings = TiersSettings(tiers=(near, far), failure_policy=policy)  # type: ignore[arg-type]
    return WatchedWorld(settings, pieces=chance.choice([1, 3]))


def run(seed: int) -> Counter[str]:
    chance = random.Random(seed)
    world = world_of(chance)
    for number in range(1, STEPS + 1):
        key = chance.choice(KEYS)
        match chance.randrange(16):
            case 0 | 1:
                world.save(number, key)
            case 2:
                world.lookup(number, KEYS)
            case 3 if world.plans:
                plan = world.plans.pop()
                world.load(number, world.plan_keys[plan.lookup][: len(plan.places)], plan.places)
            case 4:
                world.load(number, KEYS[: 1 + chance.randrange(len(KEYS))], ((0, 1),) * len(KEYS))
            case 5:
                world.remove(number, (key,))
            case 6:
                world.wait(chance.choice([0.1, 1.5, 20.0]))
            case 7:
                world.vanish(chance.randrange(2), key)
            case 8:
                world.damage(chance.randrange(2), key)
            case 9 if chance.random() < 0.2:
                world.start()
            case _ if world.jobs:
                job = chance.choice(sorted(world.jobs))
                world.end(job, chance.choice(FAULTS[:2]) if chance.random() < 0.1 else None)
    world.drain()
    world.wait(30.0)
    return world.taken


def taken_in(runs: int) -> Counter[str]:
    """The steps of so many runs, by kind."""
    taken: Counter[str] = Counter()
    for seed in range(runs):
        try:
            taken += run(seed)
        except AssertionError as illegal:
            raise AssertionError(f"seed {seed}: {illegal}") from illegal
    return taken


def test_no_run_takes_an_illegal_step() -> None:
    taken = taken_in(RUNS)
    assert set(taken) >= {*OUT, *BACK} - {"", "dropped"}, f"some step was never taken: {taken}"
    assert min(taken.values()) > RUNS / 10, taken
