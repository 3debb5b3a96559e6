"""Memory that all of a user's processes on a host share: a `FileStore` on tmpfs, read through kept mappings.

Copying out of a mapping runs at the speed of memcpy, reading the file at half of it, and making a mapping costs more
than both. So an object is mapped when it is read for the second time and the mapping is kept, the latest ones up to
`MAPPED_BYTES`. A kept mapping is used only while the file of that name is the same one (inode, size, time): what was
deleted or replaced is not there any more, although its memory is freed only when the last mapping of it goes. Objects
appear whole under their names and are never changed; who cuts such a file short by hand ends the process that reads it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from kvrelay.edge.stores.file import FileStore
from kvrelay.edge.stores.memory import fill

MAPPED_BYTES = 256 << 20
_SEEN = 4_096  # objects that were read once
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)

_Identity = tuple[int, int, int]


def shared_memory(name: str, *, capacity_bytes: int | None) -> SharedMemoryStore:
    """The memory of that name."""
    return SharedMemoryStore(Path(f"/dev/shm/kvrelay-{os.getuid()}-{name}"), capacity_bytes=capacity_bytes)


class SharedMemoryStore(FileStore):
    """It cannot hang, and it is gone with the machine's next start."""

    kind: ClassVar[str] = "memory"
    bounded: ClassVar[bool] = True

    def __init__(self, root: Path, *, capacity_bytes: int | None = None) -> None:
        super().__init__(root, capacity_bytes=capacity_bytes)
        self._maps: OrderedDict[bytes, tuple[_Identity, memoryview]] = OrderedDict()
        self.mapped_bytes = 0
        self._seen: OrderedDict[bytes, _Identity] = OrderedDict()
        self._maps_lock = threading.Lock()

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        content = self._mapped(key)
        if content is None:
            return super().read_into(key, parts, deadline_s=deadline_s)
        fill(parts, content)
        return content.nbytes

    def close(self) -> None:
        with self._maps_lock:
            self._maps.clear()
            self.mapped_bytes = 0
        super().close()

    def _mapped(self, key: bytes) -> memoryview | None:
        """The object's bytes, if it is worth a mapping. They stay valid as long as the view is held."""
        path = self._path(key)
        try:
            identity = _identity(os.stat(path))
            with self._maps_lock:
                known = self._maps.get(key)
                if known is not None and known[0] == identity:
                    self._maps.move_to_end(key)
                    return known[1]
                self._forget(key)
                if not self._second_time(key, identity):
                    return None
            return self._map(key, path)
        except (OSError, ValueError):  # it is gone, or empty, or there is no room: the plain way says what it is
            with self._maps_lock:
                self._forget(key)
            return None

    def _map(self, key: bytes, path: str) -> memoryview:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            identity = _identity(os.fstat(descriptor))
            size = identity[1]
            content = memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)
        with self._maps_lock:
            self._forget(key)
            self._maps[key] = identity, content
            self.mapped_bytes += size
            while self.mapped_bytes > MAPPED_BYTES:
                self._forget(next(iter(self._maps)))
        return content

    def _second_time(self, key: bytes, identity: _Identity) -> bool:
        if self._seen.pop(key, None) == identity:
            return True
        self._seen[key] = identity
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        return False

    def _forget(self, key: bytes) -> None:
        """The memory goes with the last reader that holds the view."""
        known = self._maps.pop(key, None)
        if known is not None:
            self.mapped_bytes -= known[1].nbytes


def _identity(status: os.stat_result) -> _Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns
