"""Whose memory may be written to, and until when.

A load's destinations belong to the engine. The moment the load is over, in whatever way, nobody writes to them any
more: a fetch that comes back late finds its lease revoked, and `revoke` waits for one that is writing just now.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Lease:
    """The destinations of one load. Writers enter by `writing`; after `revoke` there are none."""

    def __init__(self, destinations: Sequence[memoryview]) -> None:
        self._destinations = destinations
        self._writers = 0
        self._revoked = False
        self._condition = threading.Condition()

    @contextmanager
    def writing(self, position: int) -> Iterator[memoryview | None]:
        """The destination, or None when it is too late."""
        with self._condition:
            if not self._revoked:
                self._writers += 1
            open_ = not self._revoked
        try:
            yield self._destinations[position] if open_ else None
        finally:
            if open_:
                with self._condition:
                    self._writers -= 1
                    if not self._writers:
                        self._condition.notify_all()

    def revoke(self) -> None:
        with self._condition:
            self._revoked = True
            while self._writers:
                self._condition.wait()


class Scratch(threading.local):
    """Memory for what has to be unpacked, one piece per thread, used again and again."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def take(self, size: int) -> memoryview:
        """Undefined content; valid until the same thread takes again."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]
