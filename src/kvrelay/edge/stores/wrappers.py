"""Stores around stores: to count, to slow down, to break. They are ordinary stores, for tests and for drills.

Instruments wrap and do not weave: the store itself stays readable, and who needs no counting leaves it off.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from kvrelay.edge.stores.store import (
    DEFAULT_DEADLINE_S,
    Buffer,
    NoSpace,
    ObjectInfo,
    Store,
    StoreStats,
    StoreTimeout,
    StoreUnavailable,
    WriteOutcome,
)


class Wrapped(Store):
    """Everything as the inner store does it; what a wrapper changes it overrides in `_before`."""

    kind: ClassVar[str] = "wrapped"

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.shared = inner.shared

    def _before(self, op: str, deadline_s: float) -> float:
        """Called before every call with its name; returns what is left of the deadline."""
        return deadline_s

    def sizes(self, keys: Sequence[bytes], *, deadline_s: float) -> list[int | None]:
        return self.inner.sizes(keys, deadline_s=self._before("sizes", deadline_s))

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        return self.inner.read(key, deadline_s=self._before("read", deadline_s))

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        return self.inner.read_into(key, parts, deadline_s=self._before("read", deadline_s))

    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        left_s = self._before("write", deadline_s)
        return self.inner.write(key, parts, only_if_absent=only_if_absent, deadline_s=left_s, ttl_s=ttl_s)

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        return self.inner.delete(keys, deadline_s=self._before("delete", deadline_s))

    def scan(self, prefix: bytes = b"", *, deadline_s: float) -> Iterator[ObjectInfo]:
        return self.inner.scan(prefix, deadline_s=self._before("scan", deadline_s))

    def ping(self, *, deadline_s: float) -> None:
        self.inner.ping(deadline_s=self._before("ping", deadline_s))

    def stats(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> StoreStats:
        return self.inner.stats(deadline_s=self._before("stats", deadline_s))

    def close(self) -> None:
        self.inner.close()


class Metered(Wrapped):
    """Counts calls by name, and how many of them are under way at once."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: dict[str, int] = {}
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()

    def _before(self, op: str, deadline_s: float) -> float:
        with self._lock:
            self.calls[op] = self.calls.get(op, 0) + 1
        return deadline_s

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            return super().read_into(key, parts, deadline_s=deadline_s)
        finally:
            with self._lock:
                self._running -= 1


class Slow(Wrapped):
    """Every call takes `latency_s` longer, within its deadline."""

    def __init__(self, inner: Store, *, latency_s: float) -> None:
        super().__init__(inner)
        self.latency_s = latency_s

    def _before(self, op: str, deadline_s: float) -> float:
        wait_s = min(self.latency_s, deadline_s)
        if wait_s > 0:
            time.sleep(wait_s)
        if self.latency_s >= deadline_s:
            raise StoreTimeout("slower than the deadline")
        return deadline_s - wait_s


class Blackhole(Wrapped):
    """Accepts and never answers: every call ends at its deadline, until `swallows` is set to false."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.swallows = True
        self.swallowed = 0

    def _before(self, op: str, deadline_s: float) -> float:
        if self.swallows:
            self.swallowed += 1
            time.sleep(deadline_s)
            raise StoreTimeout("no answer")
        return deadline_s


class Refusing(Wrapped):
    """Refuses every call while `refuses` is true."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.refuses = True

    def _before(self, op: str, deadline_s: float) -> float:
        if self.refuses:
            raise StoreUnavailable("connection refused")
        return deadline_s


Damage = Callable[[bytes], bytes | None]


class Faulty(Wrapped):
    """Hands out what `damage` makes of a stored object (None: it is absent), and breaks writes with `break_writes`:
    `none`, `partial` (a part is kept, then an error), `silent` (a part is kept, success is reported), `full`."""

    def __init__(self, inner: Store, *, damage: Damage | None = None, break_writes: str = "none") -> None:
        super().__init__(inner)
        self.damage = damage
        self.break_writes = break_writes

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        found = self.inner.read(key, deadline_s=deadline_s)
        return found if found is None or self.damage is None else self.damage(bytes(found))

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        if self.damage is None:
            return self.inner.read_into(key, parts, deadline_s=deadline_s)
        found = self.read(key, deadline_s=deadline_s)
        if found is None:
            return None
        at = 0
        for part in parts:
            piece = bytes(found)[at : at + part.nbytes]
            part[: len(piece)] = piece
            at += len(piece)
        return len(bytes(found))

    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        if self.break_writes == "none":
            return super().write(key, parts, only_if_absent=only_if_absent, deadline_s=deadline_s, ttl_s=ttl_s)
        if self.break_writes == "full":
            raise NoSpace("no space left")
        whole = b"".join(parts)
        self.inner.write(key, [whole[: len(whole) // 2]], only_if_absent=only_if_absent, deadline_s=deadline_s)
        if self.break_writes == "partial":
            raise StoreUnavailable("the connection broke in the middle")
        return WriteOutcome.WRITTEN


def flip_bit(chance: random.Random, *, start: int = 0, end: int | None = None) -> Damage:
    """Flip one bit of the stored bytes between two offsets."""

    def damage(stored: bytes) -> bytes:
        changed = bytearray(stored)
        at = chance.randrange(start, len(changed) if end is None else min(end, len(changed)))
        changed[at] ^= 1 << chance.randrange(8)
        return bytes(changed)

    return damage
