"""Whose memory may be written to, and until when.

A load's destinations belong to the engine. The moment the load is over, in whatever way, nobody writes to them any
more: a fetch that comes back late finds its lease revoked, and `revoke` waits for one that is writing just now.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Lease:
    """The destinations of one load. Writers enter by `writer`; after `revoke` there are none."""

    def __init__(self, destinations: Sequence[memoryview]) -> None:
        self._destinations = destinations
        self._writers = 0
        self._revoked = False
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)

    def writer(self, position: int) -> Writer:
        """Whoever is to fill that destination, before the first byte."""
        return Writer(self, position)

    def revoke(self) -> None:
        with self._lock:
            self._revoked = True
            while self._writers:
                self._left.wait()

    def enter(self, position: int) -> memoryview | None:
        """The destination, to be left again; None when it is too late."""
        with self._lock:
            if self._revoked:
                return None
            self._writers += 1
        return self._destinations[position]

    def leave(self) -> None:
        with self._lock:
            self._writers -= 1
            if self._revoked and not self._writers:
                self._left.notify_all()


class Writer:
    """The right to write to one destination, from `enter` to the end of the context."""

    __slots__ = ("_entered", "_lease", "_position")

    def __init__(self, lease: Lease, position: int) -> None:
        self._lease, self._position, self._entered = lease, position, False

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._entered:
            self._lease.leave()

    def enter(self) -> memoryview | None:
        """The destination, which is nobody else's until the context ends; None when it is too late."""
        into = self._lease.enter(self._position)
        self._entered = into is not None
        return into
