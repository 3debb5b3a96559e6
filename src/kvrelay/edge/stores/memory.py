"""Objects in this process's own memory. For one worker, for tests, and behind a peer server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvrelay.edge.stores.codecs import copy
from kvrelay.edge.stores.store import (
    DEFAULT_DEADLINE_S,
    Buffer,
    NoSpace,
    ObjectInfo,
    Store,
    StoreStats,
    StoreUnavailable,
    WriteOutcome,
    total_bytes,
)

_AT_ONCE = 4096  # bytes; to copy them takes less time than to let another thread run meanwhile


class MemoryStore(Store):
    """A dict of private copies with an optional hard limit. A reader that began keeps its object alive."""

    kind: ClassVar[str] = "memory"

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self.shared = False
        self._capacity_bytes = capacity_bytes
        self._objects: dict[bytes, memoryview] = {}
        self._used_bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def sizes(self, keys: Sequence[bytes], *, deadline_s: float) -> list[int | None]:
        objects = self._open()
        return [None if (found := objects.get(key)) is None else found.nbytes for key in keys]

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        return self._open().get(key)

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        found = self._open().get(key)
        if found is None:
            return None
        fill(parts, found)
        return found.nbytes

    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        size = total_bytes(parts)
        if only_if_absent and key in self._open():
            return WriteOutcome.EXISTS
        kept = memoryview(bytearray(size))
        fill_from(kept, parts)
        with self._lock:
            objects = self._open()
            before = objects.get(key)
            if only_if_absent and before is not None:
                return WriteOutcome.EXISTS
            used = self._used_bytes + size - (0 if before is None else before.nbytes)
            if self._capacity_bytes is not None and used > self._capacity_bytes:
                raise NoSpace(f"{size} bytes do not fit beside {self._used_bytes} of {self._capacity_bytes}")
            objects[key] = kept.toreadonly()
            self._used_bytes = used
        return WriteOutcome.WRITTEN

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        gone = 0
        with self._lock:
            objects = self._open()
            for key in keys:
                found = objects.pop(key, None)
                if found is not None:
                    self._used_bytes -= found.nbytes
                    gone += 1
        return gone

    def scan(self, prefix: bytes = b"", *, deadline_s: float) -> Iterator[ObjectInfo]:
        with self._lock:
            found = [(key, kept.nbytes) for key, kept in self._open().items() if key.startswith(prefix)]
        return (ObjectInfo(key, size) for key, size in found)

    def ping(self, *, deadline_s: float) -> None:
        self._open()

    def stats(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> StoreStats:
        return StoreStats(len(self._open()), self._used_bytes, self._capacity_bytes)

    def close(self) -> None:
        self._closed = True
        self._objects = {}

    def _open(self) -> dict[bytes, memoryview]:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        return self._objects


def fill(parts: Sequence[memoryview], source: memoryview) -> None:
    """Copy `source` over the parts in order, as far as either goes."""
    at = 0
    for part in parts:
        size = min(part.nbytes, source.nbytes - at)
        if size <= 0:
            break
        if size <= _AT_ONCE:
            part[:size] = source[at : at + size]
        else:
            copy(source[at : at + size], part[:size])
        at += size


def fill_from(target: memoryview, parts: Sequence[Buffer]) -> None:
    """Concatenate the parts into `target`, which has exactly their size."""
    at = 0
    for part in parts:
        view = memoryview(part).cast("B")
        if view.nbytes:
            copy(view, target[at : at + view.nbytes])
        at += view.nbytes
