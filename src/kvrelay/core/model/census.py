"""Are two views of one worker's blocks the same? Told by a count and a sum, without sending the blocks.

Every copy of a block adds a mixed form of the engine's name for it (modulo 2**64), so the order in which blocks came
and went does not matter and a single event changes the sum in constant time. Two different sets agree by chance about
once in 2**64; somebody who chooses the names of blocks could make them agree, but whoever publishes a worker's events
can mislead its index anyway.

Tiers play no part: a move between two tiers is two events, and losing them shows in the sequence numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Census(Struct, frozen=True):
    """Distinct block names, and the sum over all copies of them."""

    blocks: int = 0
    digest: int = 0


def mixed(block_hash: int) -> int:
    """One copy's part of the digest (SplitMix64's finisher)."""
    word = (block_hash + _GOLDEN) & MASK
    word = (word ^ word >> 30) * _FIRST & MASK
    word = (word ^ word >> 27) * _SECOND & MASK
    return word ^ word >> 31


def digest_of(hashes: Iterable[int], count: int) -> int:
    """The digest of one copy of each; `count` is how many there are."""
    words = np.fromiter(hashes, dtype=np.uint64, count=count) + np.uint64(_GOLDEN)
    words = (words ^ words >> np.uint64(30)) * np.uint64(_FIRST)
    words = (words ^ words >> np.uint64(27)) * np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return int(words.sum(dtype=np.uint64))
