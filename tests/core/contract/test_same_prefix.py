"""Where two chains part, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.contract.same_prefix import parting

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@pytest.mark.covers("CC-12")
@given(shared=TOKENS, left=TOKENS, right=TOKENS, block=st.integers(1, 7))
def test_the_first_difference_and_the_blocks_before_it(
    shared: list[int], left: list[int], right: list[int], block: int
) -> None:
    one, other = shared + left, shared + right
    expected = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)

    found = parting(np.array(one, dtype=np.uint32), np.array(other, dtype=np.uint32), block_size_tokens=block)

    assert found.at_token == expected
    same = min(len(one), len(other)) if expected is None else expected
    assert found.shared_tokens == same
    assert found.shared_blocks == same // block
    assert found.same_chain == (found.shared_blocks == min(len(one), len(other)) // block)


@pytest.mark.covers("CC-12")
def test_one_token_in_another_place_is_another_chain_from_there_on() -> None:
    one = np.arange(64, dtype=np.uint32)
    other = one.copy()
    other[[20, 21]] = other[[21, 20]]

    found = parting(one, other, block_size_tokens=16)

    assert (found.at_token, found.shared_blocks, found.same_chain) == (20, 1, False)
