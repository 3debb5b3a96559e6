"""A hierarchy of tiers: what the near tier evicts goes down, and what is hit below comes up again.

The tiers are exclusive: a block is in one of them. Each lower tier keeps what came down last (LRU), whatever the policy
of the nearest one. With LRU there too, the whole is one LRU list cut in pieces, see `sizing.curve.tier_hits`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvrelay.core.cachesim.eviction.policy import Departure, EvictionPolicy, OnGone


class Tiered:
    """`make_near` makes the nearest tier's policy; `lower` are the capacities below it, nearest first."""

    def __init__(self, make_near: Callable[[OnGone], EvictionPolicy], lower: Sequence[int], on_gone: OnGone) -> None:
        self._near = make_near(self._left_near)
        self._lower_capacity = tuple(lower)
        self._lower: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in lower)
        self._on_gone = on_gone
        self.capacity = self._near.capacity + sum(lower)

    def __contains__(self, key: int) -> bool:
        return key in self._near or any(key in tier for tier in self._lower)

    def __len__(self) -> int:
        return len(self._near) + sum(len(tier) for tier in self._lower)

    def tier_of(self, key: int) -> int:
        """0 for the nearest tier. The key is there."""
        if key in self._near:
            return 0
        return next(number for number, tier in enumerate(self._lower, start=1) if key in tier)

    def access(self, key: int, now_s: float) -> bool:
        hit = key in self
        self.admit((key,), now_s)
        return hit

    def admit(self, keys: Sequence[int], now_s: float) -> None:
        for tier in self._lower:
            for key in keys:
                tier.pop(key, None)
        self._near.admit(keys, now_s)

    def advance(self, now_s: float) -> None:
        self._near.advance(now_s)

    def clear(self, why: Departure) -> None:
        """A process that ends takes every tier with it that is modelled here."""
        self._near.clear(why)
        for tier in self._lower:
            for key in tier:
                self._on_gone(key, why)
            tier.clear()

    def _left_near(self, key: int, why: Departure) -> None:
        if why is not Departure.CAPACITY:
            self._on_gone(key, why)
            return
        for tier, capacity in zip(self._lower, self._lower_capacity, strict=True):
            tier[key] = None
            if len(tier) <= capacity:
                return
            key, _ = tier.popitem(last=False)
        self._on_gone(key, Departure.CAPACITY)
