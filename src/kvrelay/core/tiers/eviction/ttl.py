"""Oldest first, however often it was used. With one time to live per tier, that is also the order of expiry."""

from __future__ import annotations


class Ttl:
    def __init__(self) -> None:
        self._order: dict[bytes, None] = {}

    def insert(self, key: bytes, now_s: float) -> None:
        self._order.setdefault(key)

    def touch(self, key: bytes, now_s: float) -> None:
        pass

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)

    def victim(self) -> bytes | None:
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)
