"""Why a block was missed, told by what would have been: was it ever seen, does another worker hold it, what took it?

A miss is not an eviction. Most misses of real traces are blocks that nobody has computed before, and no capacity helps
those. So every missed block gets exactly one class, and the classes add up to the misses.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Miss(StrEnum):
    """The order is that in which the questions are asked."""

    COLD = "cold"  # never seen, in a request of which not even the first block was
    NEW_SUFFIX = "new_suffix"  # never seen, behind a beginning that was
    OTHER_WORKER = "other_worker"  # another worker would have hit it
    CAPACITY = "capacity"  # evicted for room
    EXPIRED = "expired"  # ran out of its time to live
    INVALIDATED = "invalidated"  # a new life, epoch or a reset of the cache
    BELOW_BLOCK = "below_block"  # tokens that fill no block, or the last one, which is computed in any case


class Counted(Struct):
    """An amount in blocks and in tokens."""

    blocks: int = 0
    tokens: int = 0

    def add(self, blocks: int, tokens: int) -> None:
        self.blocks += blocks
        self.tokens += tokens
