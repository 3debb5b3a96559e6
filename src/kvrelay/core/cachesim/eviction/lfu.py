"""Least frequently used; among equals, the one whose last use is longest ago. Uses are counted while a key is there."""

from __future__ import annotations

from collections import OrderedDict

from kvrelay.core.cachesim.eviction.policy import Departure, OnGone, TailFirst, nobody


class Lfu(TailFirst):
    """One ordered set per count, so that every operation takes constant time (Shah, Mitra, Matani 2010)."""

    def __init__(self, capacity: int, on_gone: OnGone = nobody) -> None:
        self.capacity = capacity
        self._on_gone = on_gone
        self._uses: dict[int, int] = {}
        self._with_uses: dict[int, OrderedDict[int, None]] = {}
        self._fewest = 1

    def __contains__(self, key: int) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def access(self, key: int, now_s: float) -> bool:
        uses = self._uses.get(key, 0)
        if uses:
            peers = self._with_uses[uses]
            del peers[key]
            if not peers:
                del self._with_uses[uses]
                if self._fewest == uses:
                    self._fewest = uses + 1
        else:
            if len(self._uses) >= self.capacity:
                self._evict()
            self._fewest = 1
        self._uses[key] = uses + 1
        self._with_uses.setdefault(uses + 1, OrderedDict())[key] = None
        return uses > 0

    def clear(self, why: Departure) -> None:
        gone, self._uses = self._uses, {}
        self._with_uses.clear()
        for key in gone:
            self._on_gone(key, why)

    def _evict(self) -> None:
        peers = self._with_uses[self._fewest]
        key, _ = peers.popitem(last=False)
        if not peers:
            del self._with_uses[self._fewest]
        del self._uses[key]
        self._on_gone(key, Departure.CAPACITY)
