"""Objects as files: a local disk, a shared directory, or, on a RAM file system, memory shared by a host's processes.

    ROOT/objects/AB/ABCDEF...   one file per object, named by its key in hexadecimal
    ROOT/partial/...            being written
    ROOT/usage                  bytes reserved by all processes, changed under a lock

A write goes to `partial` and appears under its name by link(2), which is atomic and fails if the name exists, so that a
reader sees all of an object or nothing, and four writers of one name leave one whole object. A process that dies leaves
a file in `partial`, which the next one to open the store removes. Files are not synced unless asked: after a power
failure a cache may have lost objects, and what it half lost fails verification.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from kvrelay.edge.stores.store import (
    DEFAULT_DEADLINE_S,
    Buffer,
    NoSpace,
    ObjectInfo,
    Store,
    StoreError,
    StoreStats,
    StoreUnavailable,
    WriteOutcome,
    total_bytes,
)

ABANDONED_S = 600.0  # a partial file of another host is given up after this
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_USAGE = struct.Struct("<q")
_MAX_PARTS = os.sysconf("SC_IOV_MAX")


class FileStore(Store):
    """See the module text. `capacity_bytes` binds all processes that share the directory."""

    kind: ClassVar[str] = "file"
    bounded: ClassVar[bool] = False

    def __init__(self, root: Path, *, capacity_bytes: int | None = None, sync: bool = False) -> None:
        self._objects, self._partial = root / "objects", root / "partial"
        self._capacity_bytes = capacity_bytes
        self._sync = sync
        self._host = socket.gethostname().replace(".", "-")
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._made: set[str] = set()
        with _faults(f"open {root}"):
            self._objects.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir(exist_ok=True)
            self._usage_fd = os.open(root / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.clear_abandoned()
            self.recount()

    def sizes(self, keys: Sequence[bytes], *, deadline_s: float) -> list[int | None]:
        found: list[int | None] = []
        with _faults("look up"):
            for key in keys:
                try:
                    found.append(os.stat(self._path(key)).st_size)
                except FileNotFoundError:
                    found.append(None)
        return found

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        with _faults("read"):
            descriptor = self._open(key)
            if descriptor is None:
                return None
            try:
                content = bytearray(os.fstat(descriptor).st_size)
                got = _read_all(descriptor, [memoryview(content)])
                return memoryview(content)[:got]
            finally:
                os.close(descriptor)

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        with _faults("read"):
            descriptor = self._open(key)
            if descriptor is None:
                return None
            try:
                size = os.fstat(descriptor).st_size
                return min(size, _read_all(descriptor, parts)) if size <= total_bytes(parts) else size
            finally:
                os.close(descriptor)

    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        path, size = self._path(key), total_bytes(parts)
        with _faults("write"):
            if only_if_absent and os.path.exists(path):
                return WriteOutcome.EXISTS
            self._make_folder(path)
            self._reserve(size)
            replaced, outcome = 0, None
            try:
                outcome, replaced = self._publish(path, parts, size, only_if_absent=only_if_absent)
            finally:
                if outcome is not WriteOutcome.WRITTEN:
                    self._release(size)
            if replaced:
                self._release(replaced)
            return outcome

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        gone = 0
        with _faults("delete"):
            for key in keys:
                path = self._path(key)
                try:
                    size = os.stat(path).st_size
                    os.unlink(path)
                except FileNotFoundError:
                    continue
                self._release(size)
                gone += 1
        return gone

    def scan(self, prefix: bytes = b"", *, deadline_s: float) -> Iterator[ObjectInfo]:
        wanted = prefix.hex()
        with _faults("list"):
            folders = sorted(entry.name for entry in os.scandir(self._objects))
        for folder in folders:
            with _faults("list"):
                entries = self._entries(folder)
            for name, size, modified_s in entries:
                if name.startswith(wanted):
                    yield ObjectInfo(bytes.fromhex(name), size, modified_s)

    def ping(self, *, deadline_s: float) -> None:
        with _faults("look at"):
            os.stat(self._partial)

    def stats(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> StoreStats:
        with _faults("count"):
            objects = sum(1 for _ in self.scan(deadline_s=deadline_s))
            with self._locked():
                used = self._used()
            return StoreStats(objects, used, self._capacity_bytes, {"path": str(self._objects.parent)})

    def close(self) -> None:
        if self._usage_fd >= 0:
            os.close(self._usage_fd)
            self._usage_fd = -1

    # --- upkeep ------------------------------------------------------------------------------------------------------

    def recount(self) -> int:
        """Make the reserved bytes what really lies there; returns them."""
        with self._locked():
            used = sum(info.stored_bytes for info in self.scan(deadline_s=DEFAULT_DEADLINE_S))
            with _faults("count"):
                for entry in os.scandir(self._partial):
                    with _gone_is_fine():
                        used += entry.stat().st_size
            os.pwrite(self._usage_fd, _USAGE.pack(used), 0)
        return used

    def clear_abandoned(self) -> int:
        """Remove what dead writers left behind; how many files."""
        removed = 0
        for entry in os.scandir(self._partial):
            with _gone_is_fine():
                host, pid = entry.name.split(".")[:2]
                if host == self._host:
                    abandoned = not _alive(int(pid))
                else:
                    abandoned = time.time() - entry.stat().st_mtime > ABANDONED_S
                if abandoned:
                    os.unlink(entry.path)
                    removed += 1
        return removed

    # --- parts -------------------------------------------------------------------------------------------------------

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._objects}/{name[-2:]}/{name}"

    def _open(self, key: bytes) -> int | None:
        try:
            return os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def _entries(self, folder: str) -> list[tuple[str, int, float]]:
        found = []
        try:
            for entry in os.scandir(self._objects / folder):
                with _gone_is_fine():
                    status = entry.stat()
                    found.append((entry.name, status.st_size, status.st_mtime))
        except FileNotFoundError:
            pass
        return found

    def _make_folder(self, path: str) -> None:
        folder = os.path.dirname(path)
        if folder not in self._made:
            os.makedirs(folder, exist_ok=True)
            self._made.add(folder)

    def _publish(
        self, path: str, parts: Sequence[Buffer], size: int, *, only_if_absent: bool
    ) -> tuple[WriteOutcome, int]:
        """Write the parts elsewhere, give them their name; also how many bytes of an older object that freed."""
        partial = f"{self._partial}/{self._host}.{os.getpid()}.{next(self._serial)}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write_all(descriptor, parts)
                if os.fstat(descriptor).st_size != size:
                    raise StoreUnavailable(f"the file system kept fewer than {size} bytes")
                if self._sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if not only_if_absent:
                replaced = _size_or_zero(path)
                os.replace(partial, path)
                return WriteOutcome.WRITTEN, replaced
            return (WriteOutcome.WRITTEN if _link(partial, path) else WriteOutcome.EXISTS), 0
        finally:
            with _gone_is_fine():
                os.unlink(partial)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._usage_fd < 0:
                raise StoreUnavailable("the store is closed")
            fcntl.flock(self._usage_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._usage_fd, fcntl.LOCK_UN)

    def _used(self) -> int:
        stored = os.pread(self._usage_fd, _USAGE.size, 0)
        return int(_USAGE.unpack(stored)[0]) if len(stored) == _USAGE.size else 0

    def _reserve(self, size: int) -> None:
        with self._locked():
            used = self._used()
            if self._capacity_bytes is not None and used + size > self._capacity_bytes:
                raise NoSpace(f"{size} bytes do not fit beside {used} of {self._capacity_bytes}")
            os.pwrite(self._usage_fd, _USAGE.pack(used + size), 0)

    def _release(self, size: int) -> None:
        with self._locked():
            os.pwrite(self._usage_fd, _USAGE.pack(max(0, self._used() - size)), 0)


@contextmanager
def _faults(doing: str) -> Iterator[None]:
    """What the system says, in a store's words."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(f"cannot {doing}: {error.strerror}") from error
        raise StoreUnavailable(f"cannot {doing}: {error.strerror or error}") from error


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ValueError):
        pass


def _read_all(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Fill the parts from the start of the file; how many bytes that were."""
    waiting, done = [part for part in parts if part.nbytes], 0
    while waiting:
        got = os.preadv(descriptor, waiting[:_MAX_PARTS], done)
        if got == 0:
            break
        done += got
        waiting = _advance(waiting, got)
    return done


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    waiting = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
    while waiting:
        waiting = _advance(waiting, os.writev(descriptor, waiting[:_MAX_PARTS]))


def _advance(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts after `done` bytes."""
    for i, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[i + 1 :]]
        done -= part.nbytes
    return []


def _link(partial: str, path: str) -> bool:
    """Give the file its name; False when the name is taken."""
    try:
        os.link(partial, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    # No hard links here (some network file systems). Renaming is atomic too, and of two writers of one name the
    # later wins, with an object just as whole.
    if os.path.exists(path):
        return False
    os.replace(partial, path)
    return True


def _size_or_zero(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
