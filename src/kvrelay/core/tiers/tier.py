"""State that all parts of the machine share: the tiers, the jobs under way, what is remembered about keys."""

from __future__ import annotations

from typing import TypeVar

from kvrelay.core.tiers.breaker import Breaker
from kvrelay.core.tiers.breakeven import FetchRate, PrefillRate
from kvrelay.core.tiers.effects import Fetch, Remove, TierEffect, TierStateChanged, Transfer, Write
from kvrelay.core.tiers.ledger import Ledger
from kvrelay.core.tiers.outcome import DAMAGED, FAILURES, Outcome
from kvrelay.core.tiers.settings import TierSettings, TiersSettings
from kvrelay.core.tiers.slots import Slots

Job = TypeVar("Job")
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class TierState:
    """One tier as the machine sees it."""

    def __init__(self, index: int, settings: TierSettings, common: TiersSettings) -> None:
        self.index = index
        self.settings = settings
        self.breaker = Breaker(failures_to_open=common.failures_to_open, probe_interval_s=common.probe_interval_s)
        self.reads: Slots[Fetch | Transfer] = Slots(settings.max_fetches)
        self.writes: Slots[Write] = Slots(settings.max_writes)
        self.rate = FetchRate()
        self.ledger = Ledger(
            capacity_bytes=settings.capacity_bytes,
            ttl_s=settings.ttl_s,
            eviction=settings.eviction,
            most_indexed=common.max_remembered if settings.index else None,
        )
        self.unannounced = 0  # objects that were found here, and nobody had said so
        self.sample_due_s = 0.0

    @property
    def in_use(self) -> bool:
        return not self.breaker.out_of_use


class Remembered:
    """A bounded set of keys with an end for each; the oldest are forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._until: dict[bytes, float] = {}

    def add(self, key: bytes, until_s: float) -> None:
        self._until.pop(key, None)
        self._until[key] = until_s
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def discard(self, key: bytes) -> None:
        self._until.pop(key, None)

    def has(self, key: bytes, now_s: float) -> bool:
        until_s = self._until.get(key)
        if until_s is None:
            return False
        if until_s <= now_s:
            del self._until[key]
            return False
        return True


class Shared:
    """Tiers, counters, chance and the jobs under way."""

    def __init__(self, settings: TiersSettings, *, seed: int) -> None:
        self.settings = settings
        self.tiers = tuple(TierState(i, tier, settings) for i, tier in enumerate(settings.tiers))
        self.prefill = PrefillRate()
        self.shunned = tuple(Remembered(settings.max_remembered) for _ in settings.tiers)
        self.revoked = Remembered(settings.max_remembered)
        self._seen = Remembered(settings.max_remembered)
        self.counts: dict[tuple[int, str, Outcome], int] = {}
        self.bytes_moved: dict[tuple[int, str], int] = {}
        self.phantoms = 0
        self.removing: dict[tuple[int, bytes], int] = {}  # deletions under way
        self._jobs = 0
        self._chance = seed & _MASK

    def new_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def seen_before(self, key: bytes) -> bool:
        """Second sight: was this key saved or loaded before? It was from now on."""
        before = self.seen(key)
        self._seen.add(key, float("inf"))
        return before

    def seen(self, key: bytes) -> bool:
        return self._seen.has(key, 0.0)

    def draw(self) -> float:
        """Uniform in 0..1 from the seed (SplitMix64)."""
        self._chance = (self._chance + _GOLDEN) & _MASK
        word = self._chance
        word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK
        return float((word ^ word >> 31) >> 11) / (1 << 53)

    def count(self, tier: int, op: str, outcome: Outcome, *, times: int = 1) -> None:
        name = (tier, op, outcome)
        self.counts[name] = self.counts.get(name, 0) + times

    def count_bytes(self, tier: int, direction: str, moved: int) -> None:
        if moved:
            name = (tier, direction)
            self.bytes_moved[name] = self.bytes_moved.get(name, 0) + moved

    def heard(self, now_s: float, tier: TierState, outcome: Outcome) -> list[TierEffect]:
        """Health: every answer but silence is an answer."""
        if outcome not in FAILURES:
            tier.breaker.succeeded()
            return []
        return self.silent(now_s, tier)

    def silent(self, now_s: float, tier: TierState) -> list[TierEffect]:
        if tier.breaker.failed(now_s, self.draw()):
            return [TierStateChanged(tier.index, in_use=False)]
        return []

    def dropped(self, now_s: float, tier: TierState, key: bytes, outcome: Outcome) -> list[TierEffect]:
        """A key that is not what the tier said. It is not offered again, and what is damaged is deleted."""
        self.shunned[tier.index].add(key, now_s + self.settings.shun_s)
        tier.ledger.remove(key)
        if outcome in DAMAGED:
            return [self.remove(now_s, tier, (key,), why=outcome.value)]
        return []

    def remove(self, now_s: float, tier: TierState, keys: tuple[bytes, ...], *, why: str) -> Remove:
        for key in keys:
            self.removing[tier.index, key] = self.removing.get((tier.index, key), 0) + 1
        return Remove(self.new_job(), tier.index, keys, why, now_s + self.settings.write_deadline_s)

    def removed(self, order: Remove) -> None:
        """A deletion is over, with whatever result."""
        for key in order.keys:
            self.removing[order.tier, key] -= 1
            if not self.removing[order.tier, key]:
                del self.removing[order.tier, key]
