"""Prompts that are being prefilled right now, as an index of what will soon be resident.

A worker's event arrives no earlier than its first token, so without this a burst of requests with one new prefix would
be spread over the fleet and prefilled everywhere. An entry lives from dispatch until the blocks are announced, the
request ends or a deadline passes.

An entry is kept at *checkpoints* only: each of the first 16 blocks, then eight per doubling. So a prompt of 8,192
blocks costs 88 entries in place of 8,192, and a match is low by at most an eighth of its length: a claim made here
errs towards "not there".
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from kvrelay.core.index.match import Level, depth_levels
from kvrelay.core.model.arrays import Ints
from kvrelay.core.model.prompt import BlockKeys

_DENSE, _PER_OCTAVE = 16, 8
IN_FLIGHT_RESOLUTION = _PER_OCTAVE  # a match is low by at most one part in so many


def _checkpoints(octaves: int) -> list[int]:
    """Block indices at which entries are kept: 0..15, then the ends of eighths of [16, 32), [32, 64) and so on."""
    positions = list(range(_DENSE))
    for octave in range(octaves):
        start = _DENSE << octave
        positions += [start + (eighth + 1) * start // _PER_OCTAVE - 1 for eighth in range(_PER_OCTAVE)]
    return positions


class InFlight:
    """Entries by request id. A holder's entries are gapless at checkpoints, so the halving search is exact on them."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._more: dict[tuple[int, int], int] = {}  # (key, slot) -> entries beyond the first
        self._entries: dict[str, tuple[int, list[int]]] = {}
        self._octaves = 10
        self._checkpoints = _checkpoints(self._octaves)
        self._positions = np.array(self._checkpoints, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, request_id: str, slot: int, keys: BlockKeys) -> None:
        """The prompt with these keys was dispatched to the holder at `slot`."""
        assert request_id not in self._entries, f"{request_id} is in flight already"
        kept: list[int] = keys[self._at(len(keys))].tolist()
        bit, masks = 1 << slot, self._masks
        if masks.keys().isdisjoint(kept):  # nothing like it is under way, as a rule
            masks.update(dict.fromkeys(kept, bit))
        else:
            self._add_to_others(slot, kept)
        self._entries[request_id] = (slot, kept)

    def _add_to_others(self, slot: int, kept: list[int]) -> None:
        bit, masks = 1 << slot, self._masks
        for key in kept:
            mask = masks.get(key)
            if mask is None:
                masks[key] = bit
            elif mask & bit:
                self._more[key, slot] = self._more.get((key, slot), 0) + 1
            else:
                masks[key] = mask | bit

    def discard(self, request_id: str) -> None:
        """The entry served its purpose; unknown ids are fine (it may have been dropped before)."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        slot, kept = entry
        bit, masks, more = 1 << slot, self._masks, self._more
        for key in kept:
            if more and (key, slot) in more:
                if more[key, slot] > 1:
                    more[key, slot] -= 1
                else:
                    del more[key, slot]
            elif (mask := masks[key]) == bit:
                del masks[key]
            else:
                masks[key] = mask ^ bit

    def discard_slot(self, slot: int) -> None:
        """The holder is gone, and with it everything that was being computed there."""
        for request_id in [r for r, (holder, _) in self._entries.items() if holder == slot]:
            self.discard(request_id)

    def levels(self, keys: BlockKeys) -> list[Level]:
        """Depth in blocks per slot (bit = slot), rounded down to a checkpoint."""
        if not self._masks:
            return []
        at = self._at(len(keys))
        return [(mask, int(at[depth - 1]) + 1) for mask, depth in depth_levels(self._masks, keys[at], -1)]

    def _at(self, blocks: int) -> Ints:
        while self._checkpoints[-1] < blocks:
            self._octaves += 1
            self._checkpoints = _checkpoints(self._octaves)
            self._positions = np.array(self._checkpoints, dtype=np.int64)
        return self._positions[: bisect_right(self._checkpoints, blocks - 1)]

    def check(self) -> None:
        """Assert that masks and counts are exactly what the entries say."""
        held: dict[tuple[int, int], int] = {}
        for slot, kept in self._entries.values():
            for key in kept:
                held[key, slot] = held.get((key, slot), 0) + 1
        assert {pair: n - 1 for pair, n in held.items() if n > 1} == self._more
        masks: dict[int, int] = {}
        for key, slot in held:
            masks[key] = masks.get(key, 0) | 1 << slot
        assert masks == self._masks
