"""Token ids under digests of what they came from: bounded, least recently used, without any text."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from threading import Lock
from typing import Generic, Protocol, TypeVar

import xxhash

_SEED = secrets.randbits(64)


def digest(data: bytes) -> bytes:
    """What stands for a text in a cache of this process.

    Two texts with one digest would share token ids: a request would be routed wrongly, and nothing worse. Of a seed
    that nobody knows, nobody can prepare two. A cryptographic hash costs thirty times as much: with one, looking 64 KB
    up was a tenth of the request's way through the gateway.
    """
    return xxhash.xxh3_128_digest(data, _SEED)


class Sized(Protocol):
    """What the cache can hold; its size must not change while it lies there."""

    @property
    def nbytes(self) -> int: ...


Entry = TypeVar("Entry", bound=Sized)


class TokenCache(Generic[Entry]):
    """Least recently used entries go first; bounded in bytes. May be used by several threads."""

    ENTRY_OVERHEAD_BYTES = 300  # key, array header and place in the order

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._lock = Lock()

    @property
    def bytes_used(self) -> int:
        return self._bytes

    def get(self, key: bytes) -> Entry | None:
        entry = self._entries.get(key)
        if entry is not None:
            try:
                self._entries.move_to_end(key)
            except KeyError:  # another thread needed the room just now
                pass
        return entry

    def put(self, key: bytes, entry: Entry) -> None:
        cost = self._cost(entry)
        if cost > self._max_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = entry
            self._bytes += cost
            while self._bytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._bytes -= self._cost(dropped)

    def _cost(self, entry: Entry) -> int:
        return entry.nbytes + self.ENTRY_OVERHEAD_BYTES
