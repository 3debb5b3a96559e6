"""S3-FIFO (Yang et al., SOSP 2023): a small queue that most keys only pass, a main queue, a ghost queue of names.

The small queue holds a tenth of the room. What was used there often enough moves to the main queue, the rest leaves and
is remembered; a key that comes back while it is remembered enters the main queue at once. The main queue gives used
keys another round.
"""

from __future__ import annotations

from collections import OrderedDict

from kvrelay.core.cachesim.eviction.policy import Departure, OnGone, TailFirst, nobody

SMALL_RATIO, GHOST_RATIO = 0.1, 0.9
MOST_COUNTED = 3
USES_TO_MOVE = 2


class S3Fifo(TailFirst):
    def __init__(self, capacity: int, on_gone: OnGone = nobody) -> None:
        self.capacity = capacity
        self._on_gone = on_gone
        self._small_capacity = int(capacity * SMALL_RATIO)
        self._main_capacity = capacity - self._small_capacity
        self._ghost_capacity = int(capacity * GHOST_RATIO)
        self._small: OrderedDict[int, int] = OrderedDict()  # key -> uses since it came
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._was_full = False

    def __contains__(self, key: int) -> bool:
        return key in self._small or key in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def access(self, key: int, now_s: float) -> bool:
        if key in self._small:
            self._small[key] += 1
            return True
        if key in self._main:
            self._main[key] += 1
            return True
        remembered = key in self._ghost
        if remembered:
            del self._ghost[key]
        while len(self) >= self.capacity:
            self._evict()
        (self._main if remembered or self._passes_small() else self._small)[key] = 0
        return False

    def clear(self, why: Departure) -> None:
        gone = [*self._small, *self._main]
        for part in (self._small, self._main):
            part.clear()
        self._ghost.clear()
        for key in gone:
            self._on_gone(key, why)

    def _passes_small(self) -> bool:
        """While the cache fills for the first time, what the small queue cannot hold goes to where there is room."""
        return self._small_capacity == 0 or (not self._was_full and len(self._small) >= self._small_capacity)

    def _evict(self) -> None:
        self._was_full = True
        if len(self._main) > self._main_capacity or not self._small:
            self._evict_main()
        else:
            self._evict_small()

    def _evict_small(self) -> None:
        """Until one key has left: those that are moved on have only changed queues."""
        while self._small:
            key, uses = self._small.popitem(last=False)
            if uses >= USES_TO_MOVE:
                self._main[key] = 0
                continue
            self._remember(key)
            self._on_gone(key, Departure.CAPACITY)
            return

    def _evict_main(self) -> None:
        while True:
            key, uses = self._main.popitem(last=False)
            if uses == 0:
                self._on_gone(key, Departure.CAPACITY)
                return
            self._main[key] = min(uses, MOST_COUNTED) - 1

    def _remember(self, key: int) -> None:
        if not self._ghost_capacity:
            return
        if len(self._ghost) >= self._ghost_capacity:
            self._ghost.popitem(last=False)
        self._ghost[key] = None
