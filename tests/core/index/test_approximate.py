"""Residency guessed from what was routed: bounded, in order of use, corrected by what the engine hit."""

from __future__ import annotations

import pytest

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
