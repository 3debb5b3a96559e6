"""A prompt held against everything that is known of the fleet: matched tokens per slot and kind of holding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from kvrelay.core.index.in_flight import InFlight
from kvrelay.core.index.match import set_where
from kvrelay.core.index.residency import TIERS, Residency
from kvrelay.core.model.arrays import Floats
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
    prompt: Prompt, *, residency: Residency, in_flight: InFlight, tokens_per_block: Mapping[int, Floats], slots: int
) -> Matches:
    """Match with the keys of each block size in use.

    `tokens_per_block[size]` is that size for the slots that use it and 0 for the others: no pass touches foreign slots.
    """
    fast = ready = None
    lower: dict[str, Floats] = {}
    for size, tokens in tokens_per_block.items():
        keys = _hittable(prompt, size)
        if not len(keys):
            continue
        depth = residency.depths(keys)[:slots] * tokens
        fast = depth if fast is None else fast + depth
        if len(in_flight):
            depth = np.maximum(depth, _promised(in_flight, keys, slots) * tokens)
        ready = depth if ready is None else ready + depth
        for layer in residency.deeper_layers():
            deeper = np.maximum(residency.depths(keys, layer=layer)[:slots] * tokens, depth)
            tier = TIERS[layer].value
            lower[tier] = lower.get(tier, 0) + (deeper - depth)
            depth = deeper
    if fast is None or ready is None:
        fast = ready = np.zeros(slots)
    return Matches(fast, ready, lower)


def _hittable(prompt: Prompt, size: int) -> BlockKeys:
    """The blocks that an engine can take from its cache.

    It always computes at least the last token, so a prompt of nothing but full blocks has its last one computed again;
    claiming that one would be a claim that nobody can keep.
    """
    keys = prompt.keys.get(size)
    if keys is None:
        return _NO_KEYS
    return keys if prompt.prompt_tokens is None else keys[: max(0, prompt.prompt_tokens - 1) // size]


_NO_KEYS: BlockKeys = np.empty(0, dtype=np.uint64)


def _promised(in_flight: InFlight, keys: BlockKeys, slots: int) -> Floats:
    depth = np.zeros(slots)
    for mask, blocks in in_flight.levels(keys):
        set_where(depth, mask, blocks)
    return depth
