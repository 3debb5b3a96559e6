"""S3-FIFO (Yang et al., SOSP 2023): a small queue on probation, a main queue, and the names of what left probation.

Most objects are used once. They enter a small queue (a tenth of the objects) and leave by its end unless they were used
again meanwhile; those move to the main queue, in which a use buys another round (up to three). A name that left
probation not long ago and returns goes to the main queue at once. One scan of new prompts therefore cannot push out
what is shared.
"""

from __future__ import annotations

_SMALL_SHARE = 0.1
_MAX_USES = 3


class S3Fifo:
    def __init__(self) -> None:
        self._small: dict[bytes, int] = {}  # uses since it came, in order of arrival
        self._main: dict[bytes, int] = {}
        self._ghosts: dict[bytes, None] = {}

    def insert(self, key: bytes, now_s: float) -> None:
        if key in self._small or key in self._main:
            self.touch(key, now_s)
        elif key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, key: bytes, now_s: float) -> None:
        for queue in (self._small, self._main):
            if key in queue:
                queue[key] = min(_MAX_USES, queue[key] + 1)

    def remove(self, key: bytes) -> None:
        if self._small.pop(key, None) is not None:
            self._remember(key)
        self._main.pop(key, None)

    def victim(self) -> bytes | None:
        """Objects that were used are moved on the way; the one that is named stays first until it is removed."""
        while self._small and (len(self._small) > _SMALL_SHARE * len(self) or not self._main):
            key, uses = next(iter(self._small.items()))
            if uses == 0:
                return key
            del self._small[key]
            self._main[key] = 0
        while self._main:
            key, uses = next(iter(self._main.items()))
            if uses == 0:
                return key
            del self._main[key]
            self._main[key] = uses - 1
        return next(iter(self._small), None)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _remember(self, key: bytes) -> None:
        self._ghosts[key] = None
        while len(self._ghosts) > max(1, len(self._main)):
            del self._ghosts[next(iter(self._ghosts))]
