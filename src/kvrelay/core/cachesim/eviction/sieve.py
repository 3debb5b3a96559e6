"""SIEVE (Zhang et al., NSDI 2024): one queue, one bit, one hand.

New keys enter at the head and never move; the hand goes from the tail to the head, clears bits and takes the first key
whose bit is clear.
"""

from __future__ import annotations

from kvrelay.core.cachesim.eviction.policy import Departure, OnGone, TailFirst, nobody


class _Node:
    __slots__ = ("key", "newer", "older", "used")

    def __init__(self, key: int) -> None:
        self.key = key
        self.used = False
        self.newer: _Node | None = None
        self.older: _Node | None = None


class Sieve(TailFirst):
    def __init__(self, capacity: int, on_gone: OnGone = nobody) -> None:
        self.capacity = capacity
        self._on_gone = on_gone
        self._nodes: dict[int, _Node] = {}
        self._newest: _Node | None = None
        self._oldest: _Node | None = None
        self._hand: _Node | None = None  # None: it begins at the oldest

    def __contains__(self, key: int) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def access(self, key: int, now_s: float) -> bool:
        node = self._nodes.get(key)
        if node is not None:
            node.used = True
            return True
        if len(self._nodes) >= self.capacity:
            self._evict()
        self._nodes[key] = node = _Node(key)
        node.older = self._newest
        if self._newest is not None:
            self._newest.newer = node
        self._newest = node
        if self._oldest is None:
            self._oldest = node
        return False

    def clear(self, why: Departure) -> None:
        gone, self._nodes = self._nodes, {}
        self._newest = self._oldest = self._hand = None
        for key in gone:
            self._on_gone(key, why)

    def _evict(self) -> None:
        node = self._hand or self._oldest
        assert node is not None
        while node.used:
            node.used = False
            node = node.newer or self._oldest
            assert node is not None
        self._hand = node.newer
        self._unlink(node)
        del self._nodes[node.key]
        self._on_gone(node.key, Departure.CAPACITY)

    def _unlink(self, node: _Node) -> None:
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
