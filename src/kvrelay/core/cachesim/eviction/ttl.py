"""Least recently used with a time to live: a key that nobody used for longer than that is gone, room or not.

Keys stand in the order of their last use, so what has run out is always at the old end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrelay.core.cachesim.eviction.policy import Departure, OnGone, nobody


class Ttl:
    """`expired` counts the keys that time has taken, as opposed to room."""

    def __init__(self, capacity: int, on_gone: OnGone = nobody, *, ttl_s: float) -> None:
        self.capacity = capacity
        self.expired = 0
        self._ttl_s = ttl_s
        self._on_gone = on_gone
        self._used_s: OrderedDict[int, float] = OrderedDict()  # oldest use first

    def __contains__(self, key: int) -> bool:
        return key in self._used_s

    def __len__(self) -> int:
        return len(self._used_s)

    def access(self, key: int, now_s: float) -> bool:
        self.advance(now_s)
        used_s = self._used_s
        hit = key in used_s
        used_s[key] = now_s
        used_s.move_to_end(key)
        self._trim()
        return hit

    def admit(self, keys: Sequence[int], now_s: float) -> None:
        """All of them first, tail first, then the old end is trimmed."""
        self.advance(now_s)
        used_s = self._used_s
        for key in reversed(keys):
            used_s[key] = now_s
            used_s.move_to_end(key)
        self._trim()

    def advance(self, now_s: float) -> None:
        used_s = self._used_s
        while used_s:
            key = next(iter(used_s))
            if now_s - used_s[key] <= self._ttl_s:
                return
            del used_s[key]
            self.expired += 1
            self._on_gone(key, Departure.EXPIRED)

    def clear(self, why: Departure) -> None:
        gone, self._used_s = self._used_s, OrderedDict()
        for key in gone:
            self._on_gone(key, why)

    def _trim(self) -> None:
        while len(self._used_s) > self.capacity:
            self._on_gone(self._used_s.popitem(last=False)[0], Departure.CAPACITY)
