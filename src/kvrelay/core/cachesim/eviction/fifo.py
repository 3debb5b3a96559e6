"""First in, first out: a hit changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.cachesim.eviction.policy import Departure, OnGone, nobody


class Fifo:
    """A chain goes in from its beginning to its end, so its beginning is the first to leave."""

    def __init__(self, capacity: int, on_gone: OnGone = nobody) -> None:
        self.capacity = capacity
        self._on_gone = on_gone
        self._order: dict[int, None] = {}  # oldest insertion first

    def __contains__(self, key: int) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def access(self, key: int, now_s: float) -> bool:
        if key in self._order:
            return True
        self._order[key] = None
        self._trim()
        return False

    def admit(self, keys: Sequence[int], now_s: float) -> None:
        """All of them first, then the old end is trimmed."""
        for key in keys:
            self._order.setdefault(key)
        self._trim()

    def advance(self, now_s: float) -> None:
        """Nothing expires here."""

    def clear(self, why: Departure) -> None:
        gone, self._order = self._order, {}
        for key in gone:
            self._on_gone(key, why)

    def _trim(self) -> None:
        while len(self._order) > self.capacity:
            key = next(iter(self._order))
            del self._order[key]
            self._on_gone(key, Departure.CAPACITY)
