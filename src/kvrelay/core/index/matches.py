"""A prompt held against everything that is known of the fleet: matched tokens per slot and kind of holding."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.index.in_flight import InFlight
from kvrelay.core.index.match import set_where
from kvrelay.core.index.residency import TIERS, Residency
from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.prompt import BlockKeys, Prompt


class Matches(Struct, frozen=True, eq=False):
    """Arrays indexed by slot, in tokens (block sizes may differ between workers); floats, for the scorers."""

    fast: Floats  # in the fastest tier
    ready: Floats  # the same, or deeper where a running prefill will have made it so
    lower: dict[str, Floats]  # per lower tier, what it adds to `ready`

    def reachable(self) -> Floats:
        """In any tier."""
        return sum(self.lower.values(), start=self.ready)


def match_prompt(
    prompt: Prompt, *, residency: Residency, in_flight: InFlight, block_size_of_slot: Ints, block_sizes: tuple[int, ...]
) -> Matches:
    """Match with the keys of each block size in use; slots of another size are not touched by that pass."""
    slots = len(block_size_of_slot)
    fast = np.zeros(slots)
    if not prompt.keys:
        return Matches(fast, fast, {})
    ready = fast
    lower: dict[str, Floats] = {}
    for size in block_sizes:
        keys = prompt.keys.get(size)
        if keys is None or not len(keys):
            continue
        mine = (block_size_of_slot == size) * float(size)
        depth = residency.depths(keys)[:slots] * mine
        fast = fast + depth
        depth = np.maximum(depth, _promised(in_flight, keys, slots) * mine) if len(in_flight) else depth
        ready = ready + depth
        for layer in residency.deeper_layers():
            deeper = np.maximum(residency.depths(keys, layer=layer)[:slots] * mine, depth)
            tier = TIERS[layer].value
            lower[tier] = lower.get(tier, 0) + (deeper - depth)
            depth = deeper
    return Matches(fast, ready, lower)


def _promised(in_flight: InFlight, keys: BlockKeys, slots: int) -> Floats:
    depth = np.zeros(slots)
    for mask, blocks in in_flight.levels(keys):
        set_where(depth, mask, blocks)
    return depth
