"""A prompt held against everything that is known of the fleet: matched tokens per slot and kind of holding."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from kvrelay.core.index.in_flight import InFlight
from kvrelay.core.index.residency import TIERS, Residency
from kvrelay.core.model.arrays import Ints
from kvrelay.core.model.prompt import Prompt


class Matches(Struct, frozen=True, eq=False):
    """Arrays indexed by slot, in tokens (block sizes may differ between workers)."""

    fast: Ints  # in the fastest tier
    in_flight: Ints  # what a running prefill will add to `fast`
    lower: dict[str, Ints]  # per lower tier, what it adds to all faster ones

    def at_once(self) -> Ints:
        return self.fast + self.in_flight

    def in_lower_tiers(self) -> Ints:
        return sum(self.lower.values(), start=np.zeros_like(self.fast))


def match_prompt(
    prompt: Prompt, *, residency: Residency, in_flight: InFlight, block_size_of_slot: Ints, block_sizes: Iterable[int]
) -> Matches:
    """Match with the keys of each block size in use; slots of another size are not touched by that pass."""
    slots = len(block_size_of_slot)
    fast = np.zeros(slots, dtype=np.int64)
    promised = np.zeros(slots, dtype=np.int64)
    lower: dict[str, Ints] = {}
    for size in block_sizes:
        keys = prompt.keys.get(size)
        if keys is None or not len(keys):
            continue
        mine = block_size_of_slot == size
        depth = residency.depths(keys)[:slots] * mine
        fast += depth * size
        promised += _promised(in_flight, keys=keys, slots=slots) * mine * size
        for layer in residency.deeper_layers():
            deeper = np.maximum(residency.depths(keys, layer=layer)[:slots] * mine, depth)
            tier = TIERS[layer].value
            lower[tier] = lower.get(tier, np.zeros(slots, dtype=np.int64)) + (deeper - depth) * size
            depth = deeper
    return Matches(fast=fast, in_flight=np.maximum(promised - fast, 0), lower=lower)


def _promised(in_flight: InFlight, *, keys: np.ndarray[tuple[int], np.dtype[np.uint64]], slots: int) -> Ints:
    depth = np.zeros(slots, dtype=np.int64)
    for mask, blocks in in_flight.levels(keys):
        while mask:
            lowest = mask & -mask
            depth[lowest.bit_length() - 1] = blocks
            mask ^= lowest
    return depth
