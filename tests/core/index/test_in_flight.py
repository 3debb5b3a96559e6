"""Prompts being prefilled: never claims more than is there, and never much less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.index.in_flight import InFlight
from tests.core.index.worlds import keys


def depth(index, chain, slot=0):
    return max((blocks for mask, blocks in index.levels(keys(chain)) if mask >> slot & 1), default=0)


def test_an_entry_counts_until_it_is_discarded():
    index = InFlight()
    index.add("r", 0, keys([1, 2, 3]))
    assert depth(index, [1, 2, 9]) == 2 and depth(index, [1, 2, 9], slot=1) == 0
    index.discard("r")
    index.discard("r")
    assert depth(index, [1, 2, 9]) == 0 and len(index) == 0


def test_two_entries_with_a_common_head_are_counted_separately():
    index = InFlight()
    index.add("a", 0, keys([1, 2]))
    index.add("b", 0, keys([1, 2, 3]))
    index.discard("b")
    assert depth(index, [1, 2, 3]) == 2
    index.check()


def test_a_lost_worker_takes_its_entries_along():
    index = InFlight()
    index.add("a", 0, keys([1, 2]))
    index.add("b", 1, keys([1, 2]))
    index.discard_slot(0)
    assert "a" not in index and depth(index, [1, 2]) == 0 and depth(index, [1, 2], slot=1) == 2
    index.check()


@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 31, 32, 33, 100, 512, 3_000, 40_000])
def test_few_entries_and_a_match_low_by_an_eighth_at_most(blocks):
    index = InFlight()
    chain = list(range(blocks))
    index.add("r", 0, keys(chain))
    assert len(index._masks) <= 16 + 8 * 12
    assert blocks * 7 / 8 <= depth(index, chain) <= blocks


entries = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=40)), max_size=6)


@given(entries, st.lists(st.integers(0, 1), min_size=1, max_size=40), st.sets(st.integers(0, 5)))
def test_a_claim_is_true_and_within_an_eighth(added, asked, discarded):
    index = InFlight()
    for i, (slot, chain) in enumerate(added):
        index.add(str(i), slot, keys(chain))
    for i in discarded:
        index.discard(str(i))
    index.check()
    for slot in range(3):
        shared = [
            next((i for i, (a, b) in enumerate(zip(asked, chain, strict=False)) if a != b), min(len(asked), len(chain)))
            for i, (holder, chain) in enumerate(added)
            if holder == slot and i not in discarded
        ]
        longest = max(shared, default=0)
        assert longest * 7 / 8 <= depth(index, asked, slot) <= longest
