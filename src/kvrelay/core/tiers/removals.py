"""Deleting everywhere: every tier is asked, and one that does not answer is asked again when it is back."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.tiers.effects import RemovalFinished, Remove, TierEffect
from kvrelay.core.tiers.events import RemovalAsked, Removed
from kvrelay.core.tiers.outcome import FAILURES
from kvrelay.core.tiers.tier import Shared, TierState


class _Removal(Struct):
    asked: RemovalAsked
    counts: list[int | None]
    waiting: int


class Removals:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._jobs: dict[int, Remove] = {}
        self._of_job: dict[int, _Removal] = {}
        self._owed: list[list[tuple[bytes, ...]]] = [[] for _ in shared.tiers]

    def ask(self, now_s: float, asked: RemovalAsked) -> list[TierEffect]:
        removal = _Removal(asked, [None] * len(self._shared.tiers), 0)
        effects: list[TierEffect] = []
        for key in asked.keys:
            self._shared.revoked.add(key, now_s + self._shared.settings.shun_s)
        for tier in self._shared.tiers:
            for key in asked.keys:
                tier.ledger.remove(key)
                self._shared.shunned[tier.index].add(key, now_s + self._shared.settings.shun_s)
            if not tier.in_use:
                self._owe(tier, asked.keys)
                continue
            order = self._shared.remove(now_s, tier, asked.keys, why=asked.why)
            self._of_job[order.job] = removal
            removal.waiting += 1
            effects.append(order)
        return effects if removal.waiting else [RemovalFinished(asked.removal, tuple(removal.counts))]

    def ordered(self, order: Remove) -> None:
        """Any part of the machine has asked for a deletion."""
        self._jobs[order.job] = order

    def removed(self, now_s: float, event: Removed) -> list[TierEffect]:
        order = self._jobs.pop(event.job)
        tier = self._shared.tiers[order.tier]
        self._shared.count(tier.index, "delete", event.outcome, times=max(1, event.count))
        effects = self._shared.heard(now_s, tier, event.outcome)
        if event.outcome in FAILURES:
            self._owe(tier, order.keys)
        removal = self._of_job.pop(event.job, None)
        if removal is None:
            return effects
        removal.waiting -= 1
        removal.counts[tier.index] = None if event.outcome in FAILURES else event.count
        if removal.waiting:
            return effects
        return [*effects, RemovalFinished(removal.asked.removal, tuple(removal.counts))]

    def returned(self, now_s: float, tier: TierState) -> list[TierEffect]:
        """A tier is back: what it owes is asked for again."""
        owed, self._owed[tier.index] = self._owed[tier.index], []
        return [self._shared.remove(now_s, tier, keys, why="owed") for keys in owed]

    def owed(self, tier: TierState) -> int:
        return sum(len(keys) for keys in self._owed[tier.index])

    def _owe(self, tier: TierState, keys: tuple[bytes, ...]) -> None:
        """Bounded: what is forgotten here still expires, and is refused when read after its epoch ended."""
        if self.owed(tier) + len(keys) <= self._shared.settings.max_remembered:
            self._owed[tier.index].append(keys)
