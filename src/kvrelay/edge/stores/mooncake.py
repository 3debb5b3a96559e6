"""Mooncake Store: objects in the memory of its clients, found through a master.

Its ways, and what is made of them here. `put` of a name that exists keeps the old bytes and returns 0, so existence is
asked first (between two writers the master decides, and content under one name is equal). `get` returns an empty object
for whatever goes wrong, so the reason is asked for afterwards: an object whose owner died is still said to exist for
some seconds and counts as absent. There is no list of names but on the master's own HTTP port; without `admin` in the
URL a scan is refused. Its calls know no deadline: not `bounded`.
"""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from kvrelay.edge.stores.extras import need
from kvrelay.edge.stores.memory import fill
from kvrelay.edge.stores.store import (
    DEFAULT_DEADLINE_S,
    Buffer,
    NoSpace,
    ObjectInfo,
    Store,
    StoreStats,
    StoreUnavailable,
    WriteOutcome,
)

_PREFIX = "kvrelay-"
_BEING_WRITTEN, _NO_SUCH_OBJECT, _EXISTS_ALREADY = -703, -704, -705
_ABSENT = (_BEING_WRITTEN, _NO_SUCH_OBJECT)
_NO_ROOM = (-200, -600)  # no memory left in any segment; larger than a segment's buffer


class MooncakeStore(Store):
    """A client with a segment of `segment_bytes` that others may use. It connects when first used."""

    kind: ClassVar[str] = "mooncake"
    bounded: ClassVar[bool] = False

    def __init__(
        self, host: str, port: int, *, local_host: str, segment_bytes: int, admin_url: str | None, protocol: str = "tcp"
    ) -> None:
        self._master = f"{host}:{port}"
        self._local_host, self._segment_bytes = local_host, segment_bytes
        self._protocol, self._admin_url = protocol, admin_url
        self._library = need("mooncake.store", extra="mooncake", purpose="a Mooncake tier")
        self._client: Any = None
        self._closed = False
        self._lock = threading.Lock()

    def sizes(self, keys: Sequence[bytes], *, deadline_s: float) -> list[int | None]:
        client = self._connected()
        return [self._size(client, _name(key)) for key in keys]

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        client = self._connected()
        found: bytes = client.get(_name(key))
        if found:
            return memoryview(found)
        self._size(client, _name(key))  # raises if it was the master that did not answer
        return None

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        found = self.read(key, deadline_s=deadline_s)
        if found is None:
            return None
        fill(parts, memoryview(found))
        return memoryview(found).nbytes

    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        client, name = self._connected(), _name(key)
        there = self._size(client, name) is not None
        if there and only_if_absent:
            return WriteOutcome.EXISTS
        if there:
            client.remove(name, True)
        code = client.put_parts(name, *parts)
        if code in (_EXISTS_ALREADY, _BEING_WRITTEN):
            return WriteOutcome.EXISTS
        if code in _NO_ROOM:
            raise NoSpace(f"the master at {self._master} has no room for it ({code})")
        if code:
            raise StoreUnavailable(f"Mooncake refused to store ({code})")
        return WriteOutcome.WRITTEN

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        client, gone = self._connected(), 0
        for key in keys:
            code = client.remove(_name(key), True)
            if code not in (0, *_ABSENT):
                raise StoreUnavailable(f"Mooncake refused to delete ({code})")
            gone += code == 0
        return gone

    def scan(self, prefix: bytes = b"", *, deadline_s: float) -> Iterator[ObjectInfo]:
        if self._admin_url is None:
            raise StoreUnavailable("Mooncake lists names only on its master's HTTP port: add ?admin=PORT to the URL")
        try:
            with urllib.request.urlopen(f"{self._admin_url}/get_all_keys", timeout=deadline_s) as answer:
                names = answer.read().decode().split()
        except (OSError, urllib.error.URLError, ValueError) as error:
            raise StoreUnavailable(f"the master's HTTP port does not answer: {error}") from error
        wanted = _name(prefix)
        for name in names:
            if name.startswith(wanted):
                size = self._size(self._connected(), name)
                if size is not None:
                    yield ObjectInfo(bytes.fromhex(name[len(_PREFIX) :]), size)

    def ping(self, *, deadline_s: float) -> None:
        self._size(self._connected(), _PREFIX)

    def stats(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> StoreStats:
        sizes = [info.stored_bytes for info in self.scan(deadline_s=deadline_s)]
        return StoreStats(len(sizes), sum(sizes), None, {"master": self._master})

    def close(self) -> None:
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            if self._client is None:
                began_s, client = time.monotonic(), self._library.MooncakeDistributedStore()
                code = client.setup(
                    self._local_host, "P2PHANDSHAKE", self._segment_bytes, 16 << 20, self._protocol, "", self._master
                )
                if code:
                    took_s = time.monotonic() - began_s
                    raise StoreUnavailable(f"no Mooncake master at {self._master} ({code}, after {took_s:.1f} s)")
                self._client = client
            return self._client

    def _size(self, client: Any, name: str) -> int | None:
        size = int(client.get_size(name))
        if size >= 0:
            return size
        if size in _ABSENT:
            return None
        raise StoreUnavailable(f"the master at {self._master} does not answer ({size})")


def _name(key: bytes) -> str:
    return _PREFIX + key.hex()
