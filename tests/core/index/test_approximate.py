"""Residency guessed from what was routed: bounded, in order of use, corrected by what the engine hit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.index.approximate import Approximate
from kvrelay.core.index.residency import Residency
from tests.core.index.worlds import KEYER, SIZE, keys


@pytest.fixture
def guess():
    residency = Residency(KEYER)
    slot = residency.add_holder(SIZE)
    return residency, Approximate(residency, slot, max_blocks=5)


def depth(residency, chain):
    return int(residency.depths(keys(chain))[0])


def test_what_was_served_is_believed(guess):
    residency, approximate = guess
    approximate.served(keys([1, 2, 3]))
    assert depth(residency, [1, 2, 3, 4]) == 3


def test_beyond_the_bound_the_tail_of_the_oldest_goes_first(guess):
    residency, approximate = guess
    approximate.served(keys([1, 2, 3]))
    approximate.served(keys([4, 5, 6]))
    assert depth(residency, [1, 2, 3]) == 2 and depth(residency, [4, 5, 6]) == 3 and len(approximate) == 5
    approximate.served(keys([1, 2]))
    approximate.served(keys([7]))
    assert depth(residency, [1, 2]) == 2 and depth(residency, [4, 5, 6]) == 2
    residency.check()


def test_a_prompt_larger_than_the_bound_keeps_its_head(guess):
    residency, approximate = guess
    approximate.served(keys(range(9)))
    assert depth(residency, range(9)) == 5


def test_a_shorter_actual_hit_takes_the_rest_back(guess):
    residency, approximate = guess
    approximate.served(keys([1, 2, 3]))
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
    approximate = Approximate(residency, residency.add_holder(SIZE), max_blocks=max_blocks)
    naive = Naive(max_blocks)
    for prompt in prompts:
        approximate.served(keys(prompt))
        naive.served(prompt)
        assert len(approximate) == residency.size() == len(naive.order)
        assert all(depth(residency, block) == len(block) for block in naive.order)
        residency.check()


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(0, 7)), max_size=25))
def test_corrections_leave_no_hole_and_nothing_that_cannot_be_forgotten(answers):
    residency = Residency(KEYER)
    approximate = Approximate(residency, residency.add_holder(SIZE), max_blocks=8)
    for prompt, actual_blocks in answers:
        approximate.corrected(keys(prompt), actual_blocks=actual_blocks)
        assert len(approximate) == residency.size()
        approximate.served(keys(prompt))
        assert len(approximate) == residency.size() <= 8
        residency.check()
    for other in range(8):  # each new block pushes out what is oldest, to the last
        approximate.served(keys([100 + other]))
    assert all(depth(residency, [100 + other]) == 1 for other in range(8)) and residency.size() == 8
