"""The residency index, scenario by scenario, then against a naive model after every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvrelay.core.index.residency import TIERS, Applied, Residency
from kvrelay.core.model.events import BlocksCleared, BlocksStored
from kvrelay.core.model.units import Tier
from tests.core.index.worlds import KEYER, SIZE, engine_hash, keys, removed, stored, tokens


@pytest.fixture
def index():
    return Residency(KEYER)


def depths(index, chain, layer=0, **tags):
    return index.depths(keys(chain, **tags), layer=layer).tolist()


def test_depth_is_the_number_of_leading_blocks(index):
    a, b = index.add_holder(SIZE), index.add_holder(SIZE)
    index.apply(a, stored([1, 2, 3]))
    index.apply(b, stored([1, 9]))
    assert (a, b) == (0, 1)
    assert depths(index, [1, 2, 3, 4]) == [3, 1]
    assert depths(index, [2, 3]) == [0, 0]


@pytest.mark.covers("S07")
def test_a_removal_batch_hits_only_its_worker_and_unknown_hashes_are_counted(index):
    a, b = index.add_holder(SIZE), index.add_holder(SIZE)
    index.apply(a, stored([1]))
    index.apply(b, stored([1]))
    index.apply(a, stored([3]))
    batch = removed([1], [777], [3])
    assert index.apply(a, batch) == Applied(removed=2, unknown=1)
    assert index.apply(a, batch) == Applied(removed=0, unknown=3)
    assert depths(index, [1]) == [0, 1] and depths(index, [3]) == [0, 0]


@pytest.mark.covers("S08")
def test_blocks_whose_parent_is_unknown_wait_visibly_and_enter_when_it_comes(index):
    a = index.add_holder(SIZE)
    assert index.apply(a, stored([1, 2, 3], after=2)) == Applied(orphaned=1)
    assert depths(index, [1, 2, 3]) == [0] and index.orphans(a) == 1
    index.apply(a, stored([1]))
    assert depths(index, [1, 2, 3]) == [1] and index.orphans(a) == 1
    assert index.apply(a, stored([1, 2], after=1)) == Applied(stored=2)
    assert depths(index, [1, 2, 3]) == [3] and index.orphans(a) == 0


def test_orphans_are_bounded_and_what_is_dropped_is_counted():
    index = Residency(KEYER, max_orphan_blocks=2)
    a = index.add_holder(SIZE)
    assert index.apply(a, stored([1, 2, 3, 4], after=1)) == Applied(orphaned=2, dropped=1)


@pytest.mark.covers("S10")
def test_two_copies_need_two_removals(index):
    a = index.add_holder(SIZE)
    index.apply(a, stored([1]))
    index.apply(a, stored([1]))
    index.apply(a, removed([1]))
    assert depths(index, [1]) == [1]
    index.apply(a, removed([1]))
    assert depths(index, [1]) == [0]


def test_two_engine_names_for_one_block_are_two_copies_too(index):
    a = index.add_holder(SIZE)
    index.apply(a, stored([1]))
    index.apply(a, BlocksStored((42,), None, tokens([1]), SIZE))
    index.apply(a, removed([1]))
    assert depths(index, [1]) == [1]
    index.check()


@pytest.mark.covers("S09")
def test_a_clear_empties_one_worker_only(index):
    a, b = index.add_holder(SIZE), index.add_holder(SIZE)
    for slot in (a, b):
        index.apply(slot, stored([1, 2]))
    assert index.apply(a, BlocksCleared()) == Applied(removed=2)
    assert depths(index, [1, 2]) == [0, 2]
    index.apply(a, stored([1]))
    assert depths(index, [1, 2]) == [1, 2]


@pytest.mark.covers("S18")
def test_an_adapters_blocks_match_only_requests_for_that_adapter(index):
    a = index.add_holder(SIZE)
    index.apply(a, stored([1, 2], adapter="x"))
    assert depths(index, [1, 2], adapter="x") == [2]
    assert depths(index, [1, 2], adapter="y") == [0]
    assert depths(index, [1, 2]) == [0]


@pytest.mark.covers("S14")
def test_a_copy_in_another_tier_is_announced_without_tokens(index):
    a = index.add_holder(SIZE)
    index.apply(a, stored([1, 2]))
    assert index.apply(a, stored([1, 2], tier=Tier.CPU, with_tokens=False)) == Applied(stored=2)
    index.apply(a, removed([1, 2], tier=Tier.GPU))
    cpu = TIERS.index(Tier.CPU)
    assert depths(index, [1, 2]) == [1] and depths(index, [1, 2], layer=cpu) == [2]
    unknown = BlocksStored((5,), None, None, SIZE, tier=Tier.CPU)
    assert index.apply(a, unknown) == Applied(unknown=1)
    assert index.apply(a, BlocksCleared(Tier.GPU)) == Applied(removed=1)
    assert depths(index, [1, 2]) == [0] and depths(index, [1, 2], layer=cpu) == [2]
    assert index.apply(a, BlocksCleared(Tier.CPU)) == Applied(removed=2)
    assert depths(index, [1, 2], layer=cpu) == [0]
    index.check()


def test_a_foreign_block_size_is_not_applied(index):
    a = index.add_holder(SIZE)
    assert index.apply(a, BlocksStored((1,), None, tokens([1]), SIZE * 2)) == Applied(foreign=1)


def test_a_hole_in_a_chain_ends_the_match_there_for_its_holder_only(index):
    a, b = index.add_holder(SIZE), index.add_holder(SIZE)
    chain = list(range(40))
    for slot in (a, b):
        index.apply(slot, stored(chain))
    index.apply(a, removed(chain[:7]))
    assert depths(index, chain) == [6, 40]
    index.apply(a, stored(chain[:7], after=6))
    assert depths(index, chain) == [40, 40]


def test_dropping_hides_at_once_and_gives_memory_back_in_steps(index):
    a, b = index.add_holder(SIZE), index.add_holder(SIZE)
    chain = list(range(100))
    index.apply(a, stored(chain))
    index.apply(b, stored(chain[:10]))
    index.drop_holder(a)
    assert depths(index, chain)[b] == 10 and index.has_retired()
    newcomer = index.add_holder(SIZE)
    assert newcomer == a and depths(index, chain) == [0, 10]
    steps = 1
    while index.sweep(10):
        steps += 1
    assert steps > 10 and index.size() == 10 and depths(index, chain) == [0, 10]
    index.check()


def test_slots_and_masks_do_not_grow_with_the_number_of_restarts(index):
    for _ in range(50):
        slot = index.add_holder(SIZE)
        index.apply(slot, stored([1, 2, 3]))
        index.drop_holder(slot)
        while index.sweep(1_000):
            pass
    assert slot == 0 and index.size() == 0 and index._positions <= 2


def test_a_believed_prompt_can_be_taken_back(index):
    a = index.add_holder(SIZE)
    chain = keys([1, 2, 3])
    assert index.hold(a, chain) == 0
    assert index.hold(a, chain) == 3
    assert depths(index, [1, 2, 3]) == [3]
    assert index.release_end(a, chain.item(2)) == chain.item(1)
    assert depths(index, [1, 2, 3]) == [2] and index.held(a, chain) == 2
    assert index.goes_on(a, chain.item(0)) and not index.goes_on(a, chain.item(1))
    assert index.release_end(a, chain.item(1)) == chain.item(0) and index.release_end(a, chain.item(0)) is None
    index.check()


chains = st.lists(st.integers(0, 2), min_size=1, max_size=6)


class NaiveWorld(RuleBasedStateMachine):
    """Per holder and tier a plain list of copies of (chain) blocks; a match is counted block by block."""

    def __init__(self):
        super().__init__()
        self.index = Residency(KEYER)
        self.copies: dict[int, dict[Tier, list[tuple]]] = {}
        self.waiting: dict[int, list[tuple]] = {}

    @initialize()
    def two_holders(self):
        for _ in range(2):
            self.join()

    @rule()
    def join(self):
        if len(self.copies) < 4:
            slot = self.index.add_holder(SIZE)
            assert slot not in self.copies
            self.copies[slot] = {tier: [] for tier in TIERS}
            self.waiting[slot] = []

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.copies)))

    def known(self, slot):
        return {chain for copies in self.copies[slot].values() for chain in copies}

    @rule(data=st.data(), chain=chains, cut=st.integers(0, 5))
    def store(self, data, chain, cut):
        slot, after = self.pick(data), cut % len(chain)
        self.index.apply(slot, stored(chain, after=after))
        blocks = [tuple(chain[: i + 1]) for i in range(after, len(chain))]
        if after and tuple(chain[:after]) not in self.known(slot):
            self.waiting[slot] += blocks
        else:
            self.copies[slot][Tier.GPU] += blocks
        self.adopt(slot)

    def adopt(self, slot):
        """A waiting block enters once a copy of its parent is known."""
        entered = True
        while entered:
            entered = False
            for chain in list(self.waiting[slot]):
                if chain[:-1] in self.known(slot):
                    self.waiting[slot].remove(chain)
                    self.copies[slot][Tier.GPU].append(chain)
                    entered = True

    @rule(data=st.data(), chain=chains, tier=st.sampled_from([Tier.CPU, Tier.DISK]))
    def offload(self, data, chain, tier):
        slot = self.pick(data)
        applied = self.index.apply(slot, stored(chain, tier=tier, with_tokens=False))
        known = self.known(slot)
        blocks = [tuple(chain[: i + 1]) for i in range(len(chain))]
        self.copies[slot][tier] += [b for b in blocks if b in known]
        assert applied.unknown == len([b for b in blocks if b not in known])

    @rule(data=st.data(), chain=chains, tier=st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU, Tier.DISK]))
    def remove(self, data, chain, tier):
        slot, block = self.pick(data), tuple(chain)
        applied = self.index.apply(slot, removed(chain, tier=tier))
        if block in self.copies[slot][tier]:
            self.copies[slot][tier].remove(block)
            assert applied.removed == 1
        elif block in self.waiting[slot]:
            self.waiting[slot].remove(block)
            assert applied.removed == 1
        else:
            assert applied == Applied(unknown=1)

    @rule(data=st.data(), tier=st.sampled_from([None, Tier.GPU, Tier.CPU]))
    def clear(self, data, tier):
        slot = self.pick(data)
        self.index.apply(slot, BlocksCleared(tier))
        for each in TIERS if tier is None else [tier]:
            self.copies[slot][each] = []
        if tier in (None, Tier.GPU):
            self.waiting[slot] = []

    @rule(data=st.data())
    def drop(self, data):
        if len(self.copies) > 1:
            slot = self.pick(data)
            self.index.drop_holder(slot)
            del self.copies[slot], self.waiting[slot]

    @rule(budget=st.integers(1, 5))
    def sweep(self, budget):
        self.index.sweep(budget)

    @rule(data=st.data(), chain=st.lists(st.integers(0, 2), min_size=1, max_size=8), layer=st.integers(0, 2))
    def ask(self, data, chain, layer):
        # A holder exists in the layers it has used; what deeper ones add to nothing is nothing.
        found = np.maximum.reduce([self.index.depths(keys(chain), layer=each) for each in range(layer + 1)])
        for slot in self.copies:
            held = {block for tier in TIERS[: layer + 1] for block in self.copies[slot][tier]}
            expected = 0
            while expected < len(chain) and tuple(chain[: expected + 1]) in held:
                expected += 1
            assert found[slot] == expected, (slot, layer, chain)

    @invariant()
    def agrees(self):
        self.index.check()
        for slot in self.copies:
            assert self.index.orphans(slot) == len(set(self.waiting[slot]))
            assert self.index.blocks(slot)[Tier.GPU] == len(set(self.copies[slot][Tier.GPU]))


NaiveWorld.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.covers("RT-13")
class TestAgainstANaiveModel(NaiveWorld.TestCase):
    pass


@pytest.mark.covers("RT-13")
def test_look_ups_equal_brute_force_on_long_random_chains(index):
    rng = np.random.default_rng(5)
    trunk = rng.integers(0, 50, 300).tolist()
    held = []
    for _ in range(12):
        slot = index.add_holder(SIZE)
        cut = int(rng.integers(0, 300))
        chain = trunk[:cut] + rng.integers(0, 50, 20).tolist()
        index.apply(slot, stored(chain))
        held.append(chain)
    for _ in range(50):
        cut = int(rng.integers(1, 300))
        asked = trunk[:cut] + rng.integers(50, 99, 5).tolist()
        shared = [[a == b for a, b in zip(asked, chain, strict=False)] for chain in held]
        brute = [equal.index(False) if False in equal else len(equal) for equal in shared]
        assert depths(index, asked) == brute


def test_engine_hashes_are_compared_within_one_worker_only(index):
    a, b = index.add_holder(SIZE), index.add_holder(SIZE)
    index.apply(a, stored([1]))
    index.apply(b, BlocksStored((engine_hash([1]),), None, tokens([2]), SIZE))
    index.apply(a, removed([1]))
    assert depths(index, [2]) == [0, 1]
