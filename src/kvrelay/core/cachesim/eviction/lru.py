"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrelay.core.cachesim.eviction.policy import Departure, OnGone, nobody


class Lru:
    """`head_first` uses a chain from its beginning, so that its beginning is the first to leave: what not to do."""

    def __init__(self, capacity: int, on_gone: OnGone = nobody, *, head_first: bool = False) -> None:
        self.capacity = capacity
        self._on_gone = on_gone
        self._head_first = head_first
        self._order: OrderedDict[int, None] = OrderedDict()  # oldest use first

    def __contains__(self, key: int) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def access(self, key: int, now_s: float) -> bool:
        order = self._order
        if key in order:
            order.move_to_end(key)
            return True
        order[key] = None
        if len(order) > self.capacity:
            self._on_gone(order.popitem(last=False)[0], Departure.CAPACITY)
        return False

    def admit(self, keys: Sequence[int], now_s: float) -> None:
        """All of them first, then the old end is trimmed."""
        order = self._order
        for key in keys if self._head_first else reversed(keys):
            order[key] = None
            order.move_to_end(key)
        while len(order) > self.capacity:
            self._on_gone(order.popitem(last=False)[0], Departure.CAPACITY)

    def advance(self, now_s: float) -> None:
        """Nothing expires here."""

    def clear(self, why: Departure) -> None:
        gone, self._order = self._order, OrderedDict()
        for key in gone:
            self._on_gone(key, why)
