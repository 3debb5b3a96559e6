"""Residency guessed from what was routed: bounded, in order of use, corrected by what the engine hit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.core.index.approximate import Approximate
from kvrelay.core.index.residency import Residency
from tests.core.index.worlds import KEYER, SIZE, keys


@pytest.fixture
def guess():
    residency = Residency(KEYER)
    slot = residency.add_holder(SIZE)
    return residency, Approximate(residency, slot, max_blocks=5, ttl_s=100.0)


def depth(residency, chain):
    return int(residency.depths(keys(chain))[0])


def test_what_was_served_is_believed(guess):
    residency, approximate = guess
    approximate.served(0.0, keys([1, 2, 3]))
    assert depth(residency, [1, 2, 3, 4]) == 3


def test_beyond_the_bound_the_tail_of_the_oldest_goes_first(guess):
    residency, approximate = guess
    approximate.served(0.0, keys([1, 2, 3]))
    approximate.served(0.0, keys([4, 5, 6]))
    assert depth(residency, [1, 2, 3]) == 2 and depth(residency, [4, 5, 6]) == 3 and len(approximate) == 5
    approximate.served(0.0, keys([1, 2]))
    approximate.served(0.0, keys([7]))
    assert depth(residency, [1, 2]) == 2 and depth(residency, [4, 5, 6]) == 2
    residency.check()


def test_a_prompt_larger_than_the_bound_keeps_its_head(guess):
    residency, approximate = guess
    approximate.served(0.0, keys(range(9)))
    assert depth(residency, range(9)) == 5


def test_a_shorter_actual_hit_takes_the_rest_back(guess):
    residency, approximate = guess
    approximate.served(0.0, keys([1, 2, 3]))
    approximate.corrected(keys([1, 2, 3]), actual_blocks=1)
    assert depth(residency, [1, 2, 3]) == 1
    residency.check()


class Naive:
    """Every block by itself, least recently used first; a served prompt touches its blocks from tail to head."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.order: list[tuple[int, ...]] = []

    def served(self, chain: tuple[int, ...]) -> None:
        chain = chain[: self.max_blocks]
        for depth in range(len(chain), 0, -1):
            block = chain[:depth]
            if block in self.order:
                self.order.remove(block)
            self.order.append(block)
        del self.order[: max(0, len(self.order) - self.max_blocks)]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), max_size=25), st.integers(1, 9))
def test_it_is_the_least_recently_used_order_of_blocks_kept_per_prompt(prompts, max_blocks):
    residency = Residency(KEYER)
    approximate = Approximate(residency, residency.add_holder(SIZE), max_blocks=max_blocks, ttl_s=100.0)
    naive = Naive(max_blocks)
    for prompt in prompts:
        approximate.served(0.0, keys(prompt))
        naive.served(prompt)
        assert len(approximate) == residency.size() == len(naive.order)
        assert all(depth(residency, block) == len(block) for block in naive.order)
        residency.check()


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(0, 7)), max_size=25))
def test_corrections_leave_no_hole_and_nothing_that_cannot_be_forgotten(answers):
    residency = Residency(KEYER)
    approximate = Approximate(residency, residency.add_holder(SIZE), max_blocks=8, ttl_s=100.0)
    for prompt, actual_blocks in answers:
        approximate.corrected(keys(prompt), actual_blocks=actual_blocks)
        assert len(approximate) == residency.size()
        approximate.served(0.0, keys(prompt))
        assert len(approximate) == residency.size() <= 8
        residency.check()
    for other in range(8):  # each new block pushes out what is oldest, to the last
        approximate.served(0.0, keys([100 + other]))
    assert all(depth(residency, [100 + other]) == 1 for other in range(8)) and residency.size() == 8


def test_a_longer_actual_hit_is_believed_from_then_on(guess):
    residency, approximate = guess
    approximate.served(0.0, keys([1]))
    approximate.corrected(keys([1, 2, 3]), actual_blocks=3)
    approximate.served(0.0, keys([1, 2, 3]))
    assert depth(residency, [1, 2, 3]) == 3


def test_what_was_not_used_for_long_is_forgotten_in_steps(guess):
    residency, approximate = guess
    approximate.served(0.0, keys([1, 2, 3]))
    approximate.served(50.0, keys([1, 9]))
    assert approximate.next_expiry() == 100.0
    assert approximate.expire(99.9, 10) == 0
    assert approximate.expire(100.0, 1) == 1 and depth(residency, [1, 2, 3]) == 2
    assert approximate.expire(100.0, 10) == 1 and depth(residency, [1, 2, 3]) == 1 and depth(residency, [1, 9]) == 2
    assert approximate.expire(150.0, 10) == 2 and approximate.next_expiry() is None and len(approximate) == 0
    residency.check()


class AgainstANaiveModel(RuleBasedStateMachine):
    """The model: every block by itself with its last use; a block is gone when it, or one before it, is too old."""

    TTL_S = 10.0

    def __init__(self):
        super().__init__()
        self.residency = Residency(KEYER)
        self.slot = self.residency.add_holder(SIZE)
        self.guess = Approximate(self.residency, self.slot, max_blocks=1_000, ttl_s=self.TTL_S)
        self.now = 0.0
        self.used_at: dict[tuple[int, ...], float] = {}

    chains = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)

    @rule(chain=chains, later_s=st.integers(0, 6))
    def a_request_was_served(self, chain, later_s):
        self.now += later_s
        actual = next((i for i in range(len(chain)) if chain[: i + 1] not in self.used_at), len(chain))
        self.guess.corrected(keys(chain), actual_blocks=actual)
        self.guess.served(self.now, keys(chain))
        for depth in range(1, len(chain) + 1):
            self.used_at[chain[:depth]] = self.now

    @rule(later_s=st.integers(0, 15), budget=st.integers(1, 4))
    def time_passes(self, later_s, budget):
        self.now += later_s
        old = [block for block, at in self.used_at.items() if at + self.TTL_S <= self.now]
        gone = 0
        while forgotten := self.guess.expire(self.now, budget):
            assert forgotten <= budget
            gone += forgotten
        assert gone == len(old)
        for block in old:
            del self.used_at[block]

    @rule(chain=chains)
    def a_prompt_is_matched(self, chain):
        expected = next((i for i in range(len(chain)) if chain[: i + 1] not in self.used_at), len(chain))
        assert int(self.residency.depths(keys(chain))[self.slot]) == expected

    @invariant()
    def both_hold_the_same(self):
        self.residency.check()
        assert len(self.guess) == len(self.used_at) == self.residency.size()
        due = self.guess.next_expiry()
        assert (due is None) == (not self.used_at)
        assert due is None or due <= min(self.used_at.values()) + self.TTL_S


TestAgainstANaiveModel = AgainstANaiveModel.TestCase
TestAgainstANaiveModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
