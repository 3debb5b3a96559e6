"""An agent's replica of one worker's blocks, and the index that a router builds from it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvrelay.core.index.replica import Replica
from kvrelay.core.index.residency import TIERS as INDEX_TIERS
from kvrelay.core.index.residency import Residency
from kvrelay.core.model.census import MASK, Census, digest_of, mixed
from kvrelay.core.model.events import BlocksCleared
from kvrelay.core.model.units import Tier
from tests.core.index.worlds import KEYER, SIZE, engine_hash, keys, removed, stored

TIERS = (Tier.GPU, Tier.CPU, Tier.REMOTE)


@pytest.fixture
def replica():
    return Replica(max_blocks=1000)


def rebuilt(replica):
    """An index made of nothing but the snapshot; the worker has slot 0."""
    index = Residency(KEYER)
    index.add_holder(SIZE)
    for event in replica.snapshot():
        index.apply(0, event)
    return index


def depths(index, chain, layer=0, **tags):
    return index.depths(keys(chain, **tags), layer=layer).tolist()


def test_a_snapshot_gives_the_chains_with_their_forks_parents_first(replica):
    for chain in ([1, 2, 3], [1, 2, 9, 8], [5]):
        replica.apply(stored(chain))
    index = rebuilt(replica)
    assert [depths(index, chain) for chain in ([1, 2, 3], [1, 2, 9, 8], [5], [9])] == [[3], [4], [1], [0]]
    assert index.orphans(0) == 0 and index.census(0) == replica.census()


@pytest.mark.covers("S10")
def test_copies_survive_the_snapshot(replica):
    replica.apply(stored([1]))
    replica.apply(stored([1]))
    index = rebuilt(replica)
    index.apply(0, removed([1]))
    assert depths(index, [1]) == [1]
    index.apply(0, removed([1]))
    assert depths(index, [1]) == [0]


@pytest.mark.covers("S14")
def test_tiers_survive_the_snapshot(replica):
    replica.apply(stored([1, 2]))
    replica.apply(stored([1], tier=Tier.CPU, with_tokens=False))
    replica.apply(removed([1]))
    replica.apply(removed([1, 2]))
    index = rebuilt(replica)
    assert (depths(index, [1, 2]), depths(index, [1, 2], layer=1)) == ([0], [1])


@pytest.mark.covers("S18")
def test_adapter_salt_and_media_survive_the_snapshot(replica):
    replica.apply(stored([1, 2], adapter="x", salt="s", media=(None, "picture")))
    index = rebuilt(replica)
    assert depths(index, [1, 2], adapter="x", salt="s", media=(None, "picture")) == [2]
    assert depths(index, [1, 2], adapter="x", salt="s") == [1]
    assert depths(index, [1, 2], adapter="x") == depths(index, [1, 2], salt="s") == [0]


@pytest.mark.covers("S08")
def test_a_child_whose_parent_was_evicted_matches_again_when_the_parent_returns(replica):
    replica.apply(stored([1, 2, 3]))
    replica.apply(removed([1]))
    index = rebuilt(replica)
    assert depths(index, [1, 2, 3]) == [0] and index.census(0) == replica.census()
    index.apply(0, stored([1]))
    assert depths(index, [1, 2, 3]) == [3]


def test_a_replica_is_bounded_and_says_so(replica):
    small = Replica(max_blocks=2)
    small.apply(stored([1, 2, 3]))
    assert small.overflowed and small.census().blocks == 2
    small.apply(BlocksCleared())
    assert not small.overflowed and small.census() == Census()


@given(st.lists(st.integers(0, MASK), unique=True))
def test_a_digest_at_once_equals_the_digest_step_by_step(hashes):
    assert digest_of(hashes, len(hashes)) == sum(map(mixed, hashes)) & MASK


class AgentAndRouters(RuleBasedStateMachine):
    """One worker's events reach an agent and a router; at any time a second router starts from the snapshot.

    The naive model keeps a count of copies per chain and tier and knows nothing of keys, runs or sums.
    """

    chains = st.lists(st.integers(1, 3), min_size=1, max_size=4)
    tiers = st.sampled_from(TIERS)

    @initialize()
    def begin(self):
        self.replica = Replica(max_blocks=10_000)
        self.live = Residency(KEYER)
        self.live.add_holder(SIZE)
        self.copies = {}

    def both(self, event):
        self.replica.apply(event)
        self.live.apply(0, event)

    @rule(chain=chains, tier=tiers)
    def store(self, chain, tier):
        self.both(stored(chain, tier=tier))
        for i in range(len(chain)):
            self._add((tuple(chain[: i + 1]), tier), 1)

    @rule(chain=chains, tier=tiers)
    def announce_without_tokens(self, chain, tier):
        self.both(stored(chain, after=len(chain) - 1, tier=tier, with_tokens=False))
        if any((tuple(chain), any_tier) in self.copies for any_tier in TIERS):
            self._add((tuple(chain), tier), 1)

    @rule(chain=chains, tier=tiers)
    def remove(self, chain, tier):
        self.both(removed(chain, tier=tier))
        if (tuple(chain), tier) in self.copies:
            self._add((tuple(chain), tier), -1)

    @rule(tier=st.sampled_from((None, *TIERS)))
    def clear(self, tier):
        self.both(BlocksCleared(tier))
        self.copies = {at: n for at, n in self.copies.items() if tier is not None and at[1] is not tier}

    def _add(self, at, copies):
        self.copies[at] = self.copies.get(at, 0) + copies
        if not self.copies[at]:
            del self.copies[at]

    @invariant()
    def the_census_is_that_of_the_model(self):
        digest = sum(n * mixed(engine_hash(list(chain))) for (chain, _), n in self.copies.items()) & MASK
        assert self.replica.census() == Census(len({chain for chain, _ in self.copies}), digest)
        assert self.live.census(0) == self.replica.census()

    @invariant()
    def a_late_router_matches_what_the_model_and_the_early_router_match(self):
        late = rebuilt(self.replica)
        late.check()
        assert late.census(0) == self.replica.census()
        deepest = max([0, *late.deeper_layers()])
        for chain in {chain for chain, _ in self.copies}:
            for layer in range(deepest + 1):
                assert depths(late, list(chain), layer=layer) == [self._naive_depth(chain, INDEX_TIERS[: layer + 1])]
            assert depths(late, list(chain)) == depths(self.live, list(chain))

    def _naive_depth(self, chain, tiers):
        held = [any((chain[: i + 1], tier) in self.copies for tier in tiers) for i in range(len(chain))]
        return held.index(False) if False in held else len(chain)


TestAgentAndRouters = AgentAndRouters.TestCase
TestAgentAndRouters.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
