"""Host memory between the paged cache and the store: a fixed number of chunk-sized slots.

Pinning memory is expensive, so the slots are made once. A save that finds none is skipped (it would have been a
convenience); a load waits, in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvrelay.edge.connectors.vllm.kv.pages import Pages


class Staging:
    """Slots of shape (layers, blocks per chunk, page bytes)."""

    def __init__(self, pages: Pages, chunk_blocks: int, limit_bytes: int) -> None:
        self.chunk_bytes = pages.layers * chunk_blocks * pages.page_bytes
        self.slots = max(2, limit_bytes // max(1, self.chunk_bytes))
        self._arena = pages.empty(self.slots, chunk_blocks)
        self._free = list(range(self.slots))
        self._changed = threading.Condition()

    def rows(self, slot: int) -> torch.Tensor:
        return self._arena[slot]

    def bytes_of(self, slot: int) -> memoryview:
        return memoryview(self._arena[slot].view(-1).numpy())

    def try_take(self) -> int | None:
        with self._changed:
            # Loads keep half of the slots: a burst of saves must not hold up somebody who waits for an answer.
            return self._free.pop() if len(self._free) > self.slots // 2 else None

    @contextmanager
    def taking(self, wanted: int) -> Iterator[list[int]]:
        """At least one slot and at most `wanted`, as soon as there are any."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            taken = [self._free.pop() for _ in range(min(wanted, len(self._free)))]
        try:
            yield taken
        finally:
            for slot in taken:
                self.give_back(slot)

    def give_back(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()
