"""One prompt against a whole fleet: the form for few slots says what the form for many says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.index.in_flight import InFlight
from kvrelay.core.index.matches import match_few, match_many
from kvrelay.core.index.residency import Residency
from kvrelay.core.model.events import BlocksStored
from kvrelay.core.model.prompt import Prompt
from kvrelay.core.model.units import Tier
from tests.core.index.worlds import KEYER

SIZES = (4, 8)
chains = st.lists(st.integers(0, 1), min_size=1, max_size=6)
held = st.tuples(st.integers(0, 3), chains, st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU, Tier.REMOTE]))
flying = st.tuples(st.integers(0, 3), chains)


def tokens(chain: list[int]) -> np.ndarray:
    """Eight tokens per part, so that both block sizes have whole blocks."""
    return np.concatenate([np.arange(8, dtype=np.uint32) + 100 * part for part in chain])


def stored(chain: list[int], size: int, tier: Tier) -> BlocksStored:
    ids = tokens(chain)
    hashes = tuple(int(key) for key in KEYER.prompt_keys(ids, size))  # the engine's names happen to be ours
    return BlocksStored(hashes=hashes, parent=None, token_ids=ids, block_size_tokens=size, tier=tier)


@given(st.lists(held, max_size=8), st.lists(flying, max_size=4), chains, st.booleans())
def test_both_forms_agree_on_every_slot(holdings, in_the_air, asked, partial_last_block):
    residency, in_flight = Residency(KEYER), InFlight()
    size_of = [SIZES[number % 2] for number in range(4)]
    slots = [residency.add_holder(size) for size in size_of]
    for at, chain, tier in holdings:
        residency.apply(slots[at], stored(chain, size_of[at], tier))
    for number, (at, chain) in enumerate(in_the_air):
        in_flight.add(f"r{number}", slots[at], KEYER.prompt_keys(tokens(chain), size_of[at]))
    ids = tokens(asked)
    prompt = Prompt(len(ids) + partial_last_block, {size: KEYER.prompt_keys(ids, size) for size in SIZES})
    few = match_few(prompt, residency=residency, in_flight=in_flight, sizes=SIZES, slots=4)
    many = match_many(prompt, residency=residency, in_flight=in_flight, sizes=SIZES, slots=4)
    assert [few.at(slot) for slot in slots] == [many.at(slot) for slot in slots]
    assert few.best() == many.best() and few.promised() == many.promised()
    arrays = few.arrays()
    assert np.array_equal(arrays.reachable(), many.reachable()) and np.array_equal(arrays.fast, many.fast)


def test_a_slot_that_another_holder_takes_over_is_not_mistaken_for_it():
    residency, in_flight = Residency(KEYER), InFlight()
    first, second = residency.add_holder(4), residency.add_holder(4)
    residency.apply(first, stored([1, 2], 4, Tier.GPU))
    residency.apply(second, stored([1], 4, Tier.GPU))
    residency.drop_holder(first)
    again = residency.add_holder(4)
    ids = tokens([1, 2])
    found = match_few(
        Prompt(len(ids) + 1, {4: KEYER.prompt_keys(ids, 4)}),
        residency=residency,
        in_flight=in_flight,
        sizes=(4,),
        slots=2,
    )
    assert again == first and [found.at(slot).fast for slot in (again, second)] == [0, 8]
