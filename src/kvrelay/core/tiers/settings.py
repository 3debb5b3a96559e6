"""How tiers behave. Seconds everywhere; the product's configuration has its own units in its names."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kvrelay.core.model.units import Tier

FailurePolicy = Literal["recompute", "fail", "fallback"]
Eviction = Literal["lru", "ttl", "lfu", "s3fifo"]
WritePolicy = Literal["through", "back", "selective", "never"]
Promotion = Literal["always", "second_sight", "never"]


class TierSettings(Struct, frozen=True, kw_only=True):
    """One tier. `write`: through, at every save; back, when the tier above evicts; selective, at the second save or
    load of a key; never. `promote`: whether what was loaded from a tier below is copied here."""

    name: str
    medium: Tier
    capacity_bytes: int | None = None
    ttl_s: float | None = None
    eviction: Eviction = "lru"
    write: WritePolicy = "through"
    promote: Promotion = "always"
    max_fetches: int = 8
    max_writes: int = 4
    index: bool = False  # look-ups are answered from what this process knows of the tier, without asking it


class TiersSettings(Struct, frozen=True, kw_only=True):
    """All tiers, nearest first."""

    tiers: tuple[TierSettings, ...]
    failure_policy: FailurePolicy = "recompute"
    break_even: bool = True
    failures_to_open: int = 1  # answers that a tier may owe in a row before it is out of use
    probe_interval_s: float = 5.0  # of a tier out of use; each wait is drawn from 0.5 to 1 times this
    sample_interval_s: float = 5.0  # between measurements of a tier that break-even leaves unused
    shun_s: float = 60.0  # how long a key that was not what it claimed to be is not asked for again
    write_deadline_s: float = 10.0
    max_waiting_writes: int = 1024  # per tier; beyond, a save is refused
    max_remembered: int = 65_536  # keys seen once, shunned or revoked that are kept in mind
