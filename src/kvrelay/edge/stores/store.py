"""One interface for every place that can keep objects under a name.

A store knows nothing about KV, tenants or compatibility: names and bytes go in, the same bytes come out or nothing
does. It is synchronous and thread-safe, because bulk bytes belong on a few threads and not on an event loop. What every
implementation promises, and `tests/conformance/stores` checks:

* `write` is atomic: until it returns `WRITTEN`, and after any failure of it, no reader sees a part of it.
* `absent` and `did not answer` are different: the first is `None`, the second raises `StoreTimeout` or
  `StoreUnavailable`. Nothing but a `StoreError` leaves a store.
* A call is over within its `deadline_s` if `bounded` is true. Where a medium can hang regardless (a network file
  system), `bounded` is false and callers keep buffers that somebody else owns out of its reach.
* Memory passed to `write` is not kept after the call; memory passed to `read_into` is not touched after the call, and
  its content is undefined unless the call returned a length equal to that of the buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, ClassVar

from msgspec import Struct

Buffer = bytes | bytearray | memoryview

DEFAULT_DEADLINE_S = 2.0


class StoreError(Exception):
    """The store could not do what was asked. Says nothing about what it holds."""


class StoreUnavailable(StoreError):
    """It refused, closed or broke the connection, or answered something that is not its language."""


class StoreTimeout(StoreError):
    """It did not answer within the deadline."""


class NoSpace(StoreError):
    """It is full, or the object is larger than it ever takes."""


class WriteOutcome(StrEnum):
    WRITTEN = "written"
    EXISTS = "exists"  # `only_if_absent`, and an object of that name was there; it is untouched


class ObjectInfo(Struct, frozen=True):
    """One stored object as a scan sees it. `modified_s` is Unix time, None where the store does not keep it."""

    key: bytes
    stored_bytes: int
    modified_s: float | None = None


class StoreStats(Struct, frozen=True):
    """None: this store cannot say."""

    objects: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    detail: dict[str, Any] = {}


class Store(ABC):
    """See the module text. Keys are 1 to 64 bytes, opaque; `prefix` of a scan is a prefix of keys."""

    kind: ClassVar[str]
    bounded: ClassVar[bool] = True
    shared: bool = True  # other processes see what is written here

    @abstractmethod
    def sizes(self, keys: Sequence[bytes], *, deadline_s: float) -> list[int | None]:
        """Stored length per key, None where absent. A hint: it may be wrong by the time it is read."""

    @abstractmethod
    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        """The whole object in memory of its own, or None when the store answered that it is absent."""

    @abstractmethod
    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        """Fill `parts` in order with the object's bytes. Returns the object's stored length, which the caller compares
        with what the buffers hold, or None when absent."""

    @abstractmethod
    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        """Keep the concatenation of `parts`. `ttl_s` is honoured where the store can forget by itself."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        """How many of them were there."""

    @abstractmethod
    def scan(self, prefix: bytes = b"", *, deadline_s: float) -> Iterator[ObjectInfo]:
        """Every object whose key begins so, in no order, each at least once if it was there all the time. The deadline
        is for each round trip."""

    @abstractmethod
    def ping(self, *, deadline_s: float) -> None:
        """Returns if the store would answer now; raises as the other calls do."""

    def stats(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> StoreStats:
        return StoreStats()

    def close(self) -> None:  # noqa: B027, not every store has something to give back
        """Give back connections and memory. Calls after it raise `StoreUnavailable`."""

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> list[bool]:
        return [size is not None for size in self.sizes(keys, deadline_s=deadline_s)]


def total_bytes(parts: Sequence[Buffer]) -> int:
    """Length of the object that the parts make."""
    return sum(memoryview(part).nbytes for part in parts)
