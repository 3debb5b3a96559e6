"""Belady's optimum, which knows the future: the bound that no policy can pass, and none to deploy.

On a full cache, the key whose next use lies farthest ahead leaves, or does not enter. A block is never used without all
the blocks before it, so its next use is never earlier than theirs; with ties broken against the end of a chain, chains
stay whole and the bound in blocks holds for hits of prefixes too (Belady 1966, with bypass).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvrelay.core.cachesim.eviction.policy import Departure, OnGone, nobody

NEVER = 1 << 62


def next_uses(chains: Sequence[Sequence[int]]) -> list[list[int]]:
    """For every block of every chain, the number of the next chain with that block in it (NEVER if none)."""
    coming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        chain = chains[number]
        found.append([coming.get(key, NEVER) for key in chain])
        coming.update(dict.fromkeys(chain, number))
    found.reverse()
    return found


class Belady:
    """`future` comes from `next_uses` of the very chains that will be admitted, in that order."""

    def __init__(self, capacity: int, on_gone: OnGone = nobody, *, future: Sequence[Sequence[int]]) -> None:
        self.capacity = capacity
        self._on_gone = on_gone
        self._future = future
        self._admitted = 0
        self._next_use: dict[int, int] = {}
        self._farthest: list[tuple[int, int, int]] = []  # (-next use, -depth, key); stale entries are skipped

    def __contains__(self, key: int) -> bool:
        return key in self._next_use

    def __len__(self) -> int:
        return len(self._next_use)

    def access(self, key: int, now_s: float) -> bool:
        hit = key in self._next_use
        self.admit((key,), now_s)
        return hit

    def admit(self, keys: Sequence[int], now_s: float) -> None:
        coming = self._future[self._admitted]
        self._admitted += 1
        next_use, farthest = self._next_use, self._farthest
        for depth, key in enumerate(keys):
            next_use[key] = coming[depth]
            heapq.heappush(farthest, (-coming[depth], -depth, key))
        while len(next_use) > self.capacity:
            negative, _, key = heapq.heappop(farthest)
            if next_use.get(key) == -negative:
                del next_use[key]
                self._on_gone(key, Departure.CAPACITY)
        if len(farthest) > 4 * self.capacity + 1024:
            self._forget_stale()

    def advance(self, now_s: float) -> None:
        """Nothing expires here."""

    def clear(self, why: Departure) -> None:
        gone, self._next_use = self._next_use, {}
        self._farthest.clear()
        for key in gone:
            self._on_gone(key, why)

    def _forget_stale(self) -> None:
        self._farthest = [entry for entry in self._farthest if self._next_use.get(entry[2]) == -entry[0]]
        heapq.heapify(self._farthest)
