"""Residency guessed from what was routed, for workers that publish no events.

Bounded per holder; the blocks used longest ago are forgotten first, tails before heads, which is what a paged engine
with a free queue does too. It is a guess about a cache whose size we were not told, and marked as such wherever it
shows.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.core.index.residency import Residency
from kvrelay.core.model.prompt import BlockKeys


class Approximate:
    """What one holder probably has. Owns nothing but the order of use; the blocks live in the residency index."""

    def __init__(self, residency: Residency, slot: int, *, max_blocks: int) -> None:
        self._residency = residency
        self._slot = slot
        self._max_blocks = max_blocks
        self._order: dict[int, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._order)

    def served(self, keys: BlockKeys) -> None:
        """A prompt with these blocks went through the holder's prefill."""
        keys = keys[: self._max_blocks]
        self._residency.hold(self._slot, keys)
        for key in reversed(keys.tolist()):  # the head ends up as the most recent
            self._order.pop(key, None)
            self._order[key] = None
        self._forget(self._oldest(len(self._order) - self._max_blocks))

    def corrected(self, keys: BlockKeys, *, actual_blocks: int) -> None:
        """The engine hit only the first `actual_blocks` of what we believed: the rest is gone."""
        self._forget([key for key in keys[actual_blocks:].tolist() if key in self._order])

    def _oldest(self, count: int) -> list[int]:
        found: list[int] = []
        for key in self._order:
            if len(found) >= count:
                break
            found.append(key)
        return found

    def _forget(self, keys: Iterable[int]) -> None:
        keys = list(keys)
        for key in keys:
            del self._order[key]
        self._residency.release(self._slot, keys)
