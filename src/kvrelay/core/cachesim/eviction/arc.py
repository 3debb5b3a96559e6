"""Adaptive replacement cache (Megiddo, Modha, FAST 2003): recency and frequency, balanced by what was evicted too soon.

`_recent` (T1) holds keys used once, `_frequent` (T2) keys used more often; `_ghost_recent` (B1) and `_ghost_frequent`
(B2) remember names of what left each. A hit in a ghost list moves the target size of T1.
"""

from __future__ import annotations

from collections import OrderedDict

from kvrelay.core.cachesim.eviction.policy import Departure, OnGone, TailFirst, nobody


class Arc(TailFirst):
    def __init__(self, capacity: int, on_gone: OnGone = nobody) -> None:
        self.capacity = capacity
        self._on_gone = on_gone
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._ghost_recent: OrderedDict[int, None] = OrderedDict()
        self._ghost_frequent: OrderedDict[int, None] = OrderedDict()
        self._target_recent = 0.0

    def __contains__(self, key: int) -> bool:
        return key in self._recent or key in self._frequent

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def access(self, key: int, now_s: float) -> bool:
        if key in self._recent:
            del self._recent[key]
            self._frequent[key] = None
            return True
        if key in self._frequent:
            self._frequent.move_to_end(key)
            return True
        if key in self._ghost_recent:
            grown = self._target_recent + max(len(self._ghost_frequent) / len(self._ghost_recent), 1.0)
            self._target_recent = min(grown, float(self.capacity))
            self._replace(was_frequent=False)
            del self._ghost_recent[key]
            self._frequent[key] = None
        elif key in self._ghost_frequent:
            shrunk = self._target_recent - max(len(self._ghost_recent) / len(self._ghost_frequent), 1.0)
            self._target_recent = max(shrunk, 0.0)
            self._replace(was_frequent=True)
            del self._ghost_frequent[key]
            self._frequent[key] = None
        else:
            self._make_room()
            self._recent[key] = None
        return False

    def clear(self, why: Departure) -> None:
        gone = [*self._recent, *self._frequent]
        for part in (self._recent, self._frequent, self._ghost_recent, self._ghost_frequent):
            part.clear()
        self._target_recent = 0.0
        for key in gone:
            self._on_gone(key, why)

    def _make_room(self) -> None:
        """For a key that is in none of the four lists."""
        once = len(self._recent) + len(self._ghost_recent)
        if once == self.capacity:
            if len(self._recent) < self.capacity:
                self._ghost_recent.popitem(last=False)
                self._replace(was_frequent=False)
            else:
                self._on_gone(self._recent.popitem(last=False)[0], Departure.CAPACITY)
            return
        everything = once + len(self._frequent) + len(self._ghost_frequent)
        if everything >= self.capacity:
            if everything >= 2 * self.capacity:
                self._ghost_frequent.popitem(last=False)
            self._replace(was_frequent=False)

    def _replace(self, *, was_frequent: bool) -> None:
        if len(self) < self.capacity:
            return
        recent = len(self._recent)
        if recent and (recent > self._target_recent or (was_frequent and recent == self._target_recent)):
            key, _ = self._recent.popitem(last=False)
            self._ghost_recent[key] = None
        else:
            key, _ = self._frequent.popitem(last=False)
            self._ghost_frequent[key] = None
        self._on_gone(key, Departure.CAPACITY)
