"""What every eviction policy offers: a set of blocks of one size, bounded, that says what left it.

One policy per file, all with the same outline. A policy is a cache of objects; what a prefix cache makes of it (the hit
is the longest prefix present) is in `prefix.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol


class Departure(StrEnum):
    """Why a block is not there any more."""

    CAPACITY = "capacity"
    EXPIRED = "expired"
    INVALIDATED = "invalidated"


OnGone = Callable[[int, Departure], None]


def nobody(key: int, why: Departure) -> None:
    """For who does not ask what left."""


class EvictionPolicy(Protocol):
    """At most `capacity` keys. `on_gone` is called for every key that leaves, at the moment it does."""

    capacity: int

    def __contains__(self, key: int) -> bool: ...

    def __len__(self) -> int: ...

    def access(self, key: int, now_s: float) -> bool:
        """Use the key: True if it was there. If not it is inserted, and something else leaves for it."""
        ...

    def admit(self, keys: Sequence[int], now_s: float) -> None:
        """A request has used this chain of keys, given from its beginning to its end."""
        ...

    def advance(self, now_s: float) -> None:
        """Time has come to `now_s`: what ran out by then leaves."""
        ...

    def clear(self, why: Departure) -> None:
        """Everything leaves."""
        ...


class TailFirst:
    """The end of a chain is worth less than its beginning, so it is used first and grows old first, as in vLLM."""

    def access(self, key: int, now_s: float) -> bool:
        raise NotImplementedError

    def admit(self, keys: Sequence[int], now_s: float) -> None:
        for key in reversed(keys):
            self.access(key, now_s)

    def advance(self, now_s: float) -> None:
        """Nothing expires here."""
