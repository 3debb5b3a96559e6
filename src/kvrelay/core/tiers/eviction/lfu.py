"""Least frequently used, the least recently used of those first. Constant time per operation: one ordered dict per
count.

Counts are halved once every `_AGE_AFTER` uses per object, or yesterday's favourites would stay forever. Halving merges
neighbouring counts and keeps their order.
"""

from __future__ import annotations

_AGE_AFTER = 16


class Lfu:
    def __init__(self) -> None:
        self._count: dict[bytes, int] = {}
        self._by_count: dict[int, dict[bytes, None]] = {}
        self._uses = 0

    def insert(self, key: bytes, now_s: float) -> None:
        if key in self._count:
            self.touch(key, now_s)
            return
        self._count[key] = 1
        self._by_count.setdefault(1, {})[key] = None

    def touch(self, key: bytes, now_s: float) -> None:
        count = self._count.get(key)
        if count is None:
            return
        self._take(key, count)
        self._count[key] = count + 1
        self._by_count.setdefault(count + 1, {})[key] = None
        self._uses += 1
        if self._uses > _AGE_AFTER * len(self._count):
            self._age()

    def remove(self, key: bytes) -> None:
        count = self._count.pop(key, None)
        if count is not None:
            self._take(key, count)

    def victim(self) -> bytes | None:
        return next(iter(self._by_count[min(self._by_count)])) if self._by_count else None

    def __len__(self) -> int:
        return len(self._count)

    def _take(self, key: bytes, count: int) -> None:
        peers = self._by_count[count]
        del peers[key]
        if not peers:
            del self._by_count[count]

    def _age(self) -> None:
        self._uses = 0
        aged: dict[int, dict[bytes, None]] = {}
        for count in sorted(self._by_count):
            aged.setdefault(max(1, count // 2), {}).update(self._by_count[count])
        self._by_count = aged
        self._count = {key: count for count, keys in aged.items() for key in keys}
