"""Which kinds of store there are, which of them this installation can use, and whether one behind a URL works now."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from kvrelay.core.model.units import Tier
from kvrelay.edge.stores.config import StoreConfigError, medium_of, open_store
from kvrelay.edge.stores.extras import MissingExtra, need
from kvrelay.edge.stores.scope import Scope, scope_of
from kvrelay.edge.stores.store import StoreError

Result = TypeVar("Result")
_PROBE = b"kvrelay's probe of a store, " * 40


class Backend(Struct, frozen=True):
    """One kind. `modules`: what it needs beyond the core, with the extra that brings it."""

    url: str  # its form
    what: str
    modules: tuple[tuple[str, str], ...] = ()

    @property
    def medium(self) -> Tier:
        return medium_of(self.url)

    @property
    def scope(self) -> Scope:
        return scope_of(self.url)

    def missing(self) -> str | None:
        """Why it cannot be used here; None if it can. Imports what it needs: a package whose system libraries are not
        there counts as missing."""
        try:
            for module, extra in self.modules:
                need(module, extra=extra, purpose=f"`{self.url}`")
        except MissingExtra as problem:
            return str(problem)
        return None


BACKENDS = (
    Backend("memory://", "this process's own memory"),
    Backend("memory://NAME", "memory that all processes of one user on this host share"),
    Backend("file:///DIR", "a directory: POSIX, on a local disk or a shared file system"),
    Backend("peer://HOST:PORT", "another process's store, from `kvrelay store serve`"),
    Backend("valkey://HOST:PORT/DB", "Valkey or Redis, alone or as a cluster"),
    Backend("s3://BUCKET/PREFIX?endpoint=URL", "S3-compatible object storage", (("obstore", "s3"),)),
    Backend("mooncake://HOST:PORT", "Mooncake Store", (("mooncake.store", "mooncake"),)),
)


class Tried(Struct, frozen=True):
    """A store was given one small object of ours, which was read back and deleted. `problem` None: it works."""

    problem: str | None
    write_ms: float | None = None
    read_ms: float | None = None


def try_store(url: str, *, deadline_s: float) -> Tried:
    """Never raises for what a store does."""
    try:
        store = open_store(url, deadline_s=deadline_s)
        try:
            key = b"doctor--" + os.urandom(32)
            _, write_ms = _timed(lambda: store.write(key, [_PROBE], only_if_absent=True, deadline_s=deadline_s))
            found, read_ms = _timed(lambda: store.read(key, deadline_s=deadline_s))
            store.delete([key], deadline_s=deadline_s)
        finally:
            store.close()
    except (StoreError, StoreConfigError, ValueError) as error:
        return Tried(str(error))
    as_written = found is not None and bytes(found) == _PROBE
    return Tried(None if as_written else "it did not give back what was written", write_ms, read_ms)


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What it gives, and the milliseconds it took."""
    began_s = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - began_s) * 1000
