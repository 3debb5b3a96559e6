"""Ten thousand random pairs of contracts: two name one block alike only when all members are equal."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec import structs

from kvrelay.core.contract.fields import Contract
from kvrelay.core.contract.identity import Namespace, block_identities

BLOCK = np.arange(16, dtype=np.uint32)
WORDS = ("", "a", "b", "ab", "a b", "1", "11", "bfloat16", "float16")


def drawn(chance: random.Random) -> Contract:
    members = {name: chance.choice(WORDS) for name in Contract.__struct_fields__}
    return Contract(**{**members, "block_size": chance.choice((1, 11, 16))})


def identity(contract: Contract) -> bytes:
    (name,) = block_identities(Namespace(contract.digest(), "t", b"secret", 0), BLOCK, 16)
    return name


@pytest.mark.covers("CC-15", "CC-16")
def test_one_name_only_for_equal_contracts() -> None:
    chance = random.Random(16)
    equal = 0
    for _ in range(10_000):
        first = drawn(chance)
        # Half of the pairs differ in at most one member: that is where mistakes would hide.
        name = chance.choice(Contract.__struct_fields__)
        second = drawn(chance)
        if chance.random() < 0.5:
            second = structs.replace(first, **{name: getattr(second, name)})
        assert (identity(first) == identity(second)) == (first == second), (first, second)
        equal += first == second
    assert equal > 300
