"""A prompt held against everything that is known of the fleet: matched tokens per slot and kind of holding.

Two forms of the same answer. Up to `FEW_SLOTS` slots a dozen numpy calls cost more than the arithmetic they do, so
small fleets are worked out in plain numbers; a fleet of hundreds gets arrays. Tests hold the two forms equal.

A key is of one block size, and so are all who have it: no pass for one size touches workers of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from kvrelay.core.index.in_flight import InFlight
from kvrelay.core.index.match import set_where
from kvrelay.core.index.residency import TIERS, Residency
from kvrelay.core.model.arrays import Floats
from kvrelay.core.model.prompt import BlockKeys, Prompt

FEW_SLOTS = 16
_NOTHING: Mapping[str, int] = {}


class SlotMatch(Struct, frozen=True):
    """What one slot can reuse of the prompt, in tokens."""

    fast: int = 0  # in the fastest tier
    ready: int = 0  # the same, or deeper where a running prefill will have made it so
    lower: Mapping[str, int] = _NOTHING  # per lower tier, what it adds to `ready`

    def reachable(self) -> int:
        """In any tier."""
        return sum(self.lower.values(), start=self.ready) if self.lower else self.ready


class Matches(Protocol):
    """The answer for every slot."""

    def at(self, slot: int) -> SlotMatch: ...

    def best(self) -> int:
        """Tokens that the slot with the deepest match can reach."""
        ...

    def promised(self) -> bool:
        """Whether that depth is reached by a running prefill only."""
        ...

    def arrays(self) -> ArrayMatches: ...


class ArrayMatches(Struct, frozen=True, eq=False):
    """Arrays indexed by slot, in tokens (block sizes may differ between workers); floats, for the scorers."""

    fast: Floats
    ready: Floats
    lower: dict[str, Floats]

    def reachable(self) -> Floats:
        """In any tier."""
        return sum(self.lower.values(), start=self.ready)

    def at(self, slot: int) -> SlotMatch:
        lower = {tier: int(tokens.item(slot)) for tier, tokens in self.lower.items()} if self.lower else _NOTHING
        return SlotMatch(int(self.fast.item(slot)), int(self.ready.item(slot)), lower)

    def best(self) -> int:
        return int(np.maximum.reduce(self.reachable()))

    def promised(self) -> bool:
        return self.ready is not self.fast and bool(self.ready.max() > self.fast.max())

    def arrays(self) -> ArrayMatches:
        return self


class FewMatches:
    """Plain numbers by slot, in tokens. `lower` has a list per lower tier, as `SlotMatch`."""

    __slots__ = ("fast", "lower", "reachable", "ready")

    def __init__(self, fast: list[int], ready: list[int], lower: dict[str, list[int]]) -> None:
        self.fast = fast
        self.ready = ready
        self.lower = lower
        self.reachable = [sum(each) for each in zip(ready, *lower.values(), strict=True)] if lower else ready

    def at(self, slot: int) -> SlotMatch:
        lower = {tier: tokens[slot] for tier, tokens in self.lower.items()} if self.lower else _NOTHING
        return SlotMatch(self.fast[slot], self.ready[slot], lower)

    def best(self) -> int:
        return max(self.reachable)

    def promised(self) -> bool:
        return self.ready is not self.fast and max(self.ready) > max(self.fast)

    def arrays(self) -> ArrayMatches:
        return ArrayMatches(
            fast=np.array(self.fast, dtype=np.float64),
            ready=np.array(self.ready, dtype=np.float64),
            lower={tier: np.array(tokens, dtype=np.float64) for tier, tokens in self.lower.items()},
        )


def match_prompt(
    prompt: Prompt, *, residency: Residency, in_flight: InFlight, sizes: Sequence[int], slots: int
) -> Matches:
    """Match with the keys of each of the block sizes in use."""
    if slots <= FEW_SLOTS:
        return match_few(prompt, residency=residency, in_flight=in_flight, sizes=sizes, slots=slots)
    return match_many(prompt, residency=residency, in_flight=in_flight, sizes=sizes, slots=slots)


def match_many(
    prompt: Prompt, *, residency: Residency, in_flight: InFlight, sizes: Sequence[int], slots: int
) -> ArrayMatches:
    """All slots at once."""
    fast = ready = None
    lower: dict[str, Floats] = {}
    for size in sizes:
        keys = _hittable(prompt, size)
        if not len(keys):
            continue
        depth = residency.tokens(keys, size)[:slots]
        fast = depth if fast is None else fast + depth
        if len(in_flight):
            depth = np.maximum(depth, _promised(in_flight, keys, size, slots))
        ready = depth if ready is None else ready + depth
        for layer in residency.deeper_layers():
            deeper = np.maximum(residency.tokens(keys, size, layer=layer)[:slots], depth)
            tier = TIERS[layer].value
            lower[tier] = lower.get(tier, 0) + (deeper - depth)
            depth = deeper
    if fast is None or ready is None:
        fast = ready = np.zeros(slots)
    return ArrayMatches(fast, ready, lower)


def match_few(
    prompt: Prompt, *, residency: Residency, in_flight: InFlight, sizes: Sequence[int], slots: int
) -> FewMatches:
    """Only the slots that hold something are touched."""
    fast = [0] * slots
    ready = fast
    layers = residency.deeper_layers()
    reached: list[list[int]] = [[0] * slots for _ in layers]  # per lower layer, `ready` and what lies down to it
    for size in sizes:
        keys = _hittable(prompt, size)
        if not len(keys):
            continue
        residency.tell_depths(keys, size, fast)
        if len(in_flight):
            ready = fast.copy() if ready is fast else ready
            for mask, blocks in in_flight.levels(keys):
                _raise_to(ready, mask, blocks * size)
        for layer, tokens in zip(layers, reached, strict=True):
            residency.tell_depths(keys, size, tokens, layer=layer)
    if ready is not fast:
        ready = [max(pair) for pair in zip(fast, ready, strict=True)]
    lower: dict[str, list[int]] = {}
    depth = ready
    for layer, tokens in zip(layers, reached, strict=True):
        deeper = [max(pair) for pair in zip(depth, tokens, strict=True)]
        lower[TIERS[layer].value] = [below - above for below, above in zip(deeper, depth, strict=True)]
        depth = deeper
    return FewMatches(fast, ready, lower)


def _raise_to(tokens: list[int], mask: int, value: int) -> None:
    while mask:
        lowest = mask & -mask
        slot = lowest.bit_length() - 1
        tokens[slot] = max(tokens[slot], value)
        mask ^= lowest


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


def _promised(in_flight: InFlight, keys: BlockKeys, size: int, slots: int) -> Floats:
    tokens = np.zeros(slots)
    for mask, blocks in in_flight.levels(keys):
        set_where(tokens, mask, blocks * size)
    return tokens
