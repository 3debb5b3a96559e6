"""Least recently used: a dict in order of last use."""

from __future__ import annotations


class Lru:
    def __init__(self) -> None:
        self._order: dict[bytes, None] = {}

    def insert(self, key: bytes, now_s: float) -> None:
        self._order.pop(key, None)
        self._order[key] = None

    def touch(self, key: bytes, now_s: float) -> None:
        if key in self._order:
            self.insert(key, now_s)

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)

    def victim(self) -> bytes | None:
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)
