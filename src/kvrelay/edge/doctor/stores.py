"""Tries every tier of `[store]` with one small object of its own: written, read back, deleted."""

from __future__ import annotations

from kvrelay.core.doctor.facts import StoreFacts
from kvrelay.core.model.units import Tier
from kvrelay.edge.system.sections import StoreSection, StoreTier

DEADLINE_S = 2.0


def try_tiers(section: StoreSection) -> tuple[StoreFacts, ...]:
    """One record per tier, in their order. Never raises for what a tier does."""
    return tuple(_try(tier) for tier in section.tiers)


def _try(tier: StoreTier) -> StoreFacts:
    from kvrelay.edge.stores.backends import try_store  # only who has tiers needs what they need
    from kvrelay.edge.stores.config import medium_of

    tried = try_store(tier.url, deadline_s=DEADLINE_S)
    name = tier.name or tier.url.partition(":")[0]
    if tried.write_ms is None:
        return StoreFacts(name=name, problem=tried.problem)
    memory_bytes = (tier.bytes or 0) if medium_of(tier.url) is Tier.CPU else 0
    return StoreFacts(
        name=name,
        problem=tried.problem,
        write_ms=tried.write_ms,
        read_ms=tried.read_ms,
        host_memory_bytes=memory_bytes,
    )
