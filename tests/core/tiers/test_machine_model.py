"""The tier machine against the naive world: every job ends well, badly, late or never, and crashes come at every
step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.core.model.units import Tier
from kvrelay.core.tiers.effects import Fetch, Write
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.core.tiers.settings import TierSettings, TiersSettings
from tests.core.tiers.world import CHUNK_BYTES, World, running

KEYS = tuple(bytes([n]) * 4 for n in range(8))
key = st.sampled_from(KEYS)
keys = st.lists(key, min_size=1, max_size=5, unique=True).map(tuple)
fault = st.sampled_from([Outcome.TIMEOUT, Outcome.UNAVAILABLE])
write_fault = st.sampled_from([Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.NO_SPACE, Outcome.PARTIAL])
MAX_FETCHES = 2


class TiersAgainstTheWorld(RuleBasedStateMachine):
    @initialize(
        capacity=st.sampled_from([None, 3 * CHUNK_BYTES]),
        eviction=st.sampled_from(["lru", "ttl", "lfu", "s3fifo"]),
        write=st.sampled_from(["through", "back", "selective"]),
        promote=st.sampled_from(["always", "second_sight", "never"]),
        policy=st.sampled_from(["recompute", "fail", "fallback"]),
        pieces=st.sampled_from([1, 3]),
        ttl_s=st.sampled_from([None, 30.0]),
        index=st.booleans(),
    )
    def begin(self, capacity, eviction, write, promote, policy, pieces, ttl_s, index) -> None:  # type: ignore[no-untyped-def]
        near = TierSettings(
            name="near", medium=Tier.CPU, capacity_bytes=capacity, eviction=eviction, promote=promote, ttl_s=ttl_s,
            max_fetches=MAX_FETCHES, max_writes=MAX_FETCHES,
        )  # fmt: skip
        far = TierSettings(
            name="far", medium=Tier.REMOTE, write=write, index=index, max_fetches=MAX_FETCHES, max_writes=2
        )
        self.world = World(TiersSettings(tiers=(near, far), failure_policy=policy), pieces=pieces)
        self.serial = 0

    def number(self) -> int:
        self.serial += 1
        return self.serial

    @rule(keys=keys)
    def look_up(self, keys: tuple[bytes, ...]) -> None:
        self.world.lookup(self.number(), keys)

    @rule()
    @precondition(lambda self: self.world.plans)
    def load_what_was_found(self) -> None:
        plan = self.world.plans.pop()
        self.world.load(self.number(), self.world.plan_keys[plan.lookup][: len(plan.places)], plan.places)

    @rule(keys=keys)
    def load_without_asking(self, keys: tuple[bytes, ...]) -> None:
        self.world.load(self.number(), keys, ((0, 1),) * len(keys))

    @rule(key=key)
    def save(self, key: bytes) -> None:
        self.world.save(self.number(), key)

    @rule(keys=keys)
    def delete(self, keys: tuple[bytes, ...]) -> None:
        self.world.remove(self.number(), keys)

    @rule(keys=keys)
    def warm(self, keys: tuple[bytes, ...]) -> None:
        self.world.warm(keys)

    @rule(data=st.data())
    @precondition(lambda self: self.world.jobs)
    def a_job_ends_well(self, data: st.DataObject) -> None:
        self.world.end(data.draw(st.sampled_from(sorted(self.world.jobs))))

    @rule(data=st.data())
    @precondition(lambda self: self.world.jobs)
    def a_job_ends_badly(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.world.jobs)))
        is_write = isinstance(self.world.jobs[number], Write)
        self.world.end(number, data.draw(write_fault if is_write else fault))

    @rule(seconds=st.sampled_from([0.1, 1.5, 7.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def everything_ends_well(self) -> None:
        self.world.drain()

    @rule(tier=st.sampled_from([0, 1]), key=key)
    def vanish(self, tier: int, key: bytes) -> None:
        self.world.vanish(tier, key)

    @rule(tier=st.sampled_from([0, 1]), key=key)
    def damage(self, tier: int, key: bytes) -> None:
        self.world.damage(tier, key)

    @rule()
    def crash(self) -> None:
        """The stores keep what they have, also halves; the next process has to cope."""
        self.world.start()

    @invariant()
    def one_fetch_per_key_and_few_at_a_time(self) -> None:
        if not hasattr(self, "world"):
            return
        for tier in (0, 1):
            fetches = running(self.world, Fetch, lambda job, tier=tier: job.tier == tier)  # type: ignore[misc]
            wanted = [job.key for job in fetches if isinstance(job, Fetch) and job.load is not None]
            assert len(wanted) == len(set(wanted)), "one key is fetched twice at once"
            assert len(fetches) <= MAX_FETCHES

    def teardown(self) -> None:
        """Nobody waits forever, and what was deleted is gone."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.wait(20.0)
        for kind in ("lookup", "load", "save"):
            assert not world.asked[kind], f"a {kind} is still waited for long after its deadline"
        for _ in range(4):  # tiers return, owed deletions go out
            world.drain()
            world.wait(20.0)
        assert not world.jobs or all(job.tier == 1 for job in world.jobs.values() if hasattr(job, "tier"))
        world.drain()
        assert not world.asked["removal"]
        for key in world.deleted:
            for tier in (0, 1):
                assert not world.there(tier, key), f"{key!r} was deleted and lies in tier {tier}"


TestTiersAgainstTheWorld = TiersAgainstTheWorld.TestCase
TestTiersAgainstTheWorld.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTiersAgainstTheWorld = pytest.mark.covers("S35", "S37", "TR-24")(TestTiersAgainstTheWorld)
