"""Tries every tier of `[store]` with one small object of its own: written, read back, deleted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from kvrelay.core.doctor.facts import StoreFacts
from kvrelay.core.model.units import Tier
from kvrelay.edge.system.sections import StoreSection, StoreTier

DEADLINE_S = 2.0
_PROBE = b"kvrelay doctor's probe, " * 40


def try_tiers(section: StoreSection) -> tuple[StoreFacts, ...]:
    """One record per tier, in their order. Never raises for what a tier does."""
    return tuple(_try(tier) for tier in section.tiers)


def _try(tier: StoreTier) -> StoreFacts:
    from kvrelay.edge.stores.config import medium_of, open_store  # only who has tiers needs what they need
    from kvrelay.edge.stores.store import StoreError

    name = tier.name or tier.url.partition(":")[0]
    in_memory = medium_of(tier.url) is Tier.CPU
    try:
        store = open_store(tier.url, deadline_s=DEADLINE_S)
        try:
            key = b"doctor--" + os.urandom(32)
            write_ms = _timed_ms(lambda: store.write(key, [_PROBE], only_if_absent=True, deadline_s=DEADLINE_S))
            read_ms = _timed_ms(lambda: store.read(key, deadline_s=DEADLINE_S))
            found = store.read(key, deadline_s=DEADLINE_S)
            store.delete([key], deadline_s=DEADLINE_S)
        finally:
            store.close()
    except (StoreError, ValueError) as error:
        return StoreFacts(name=name, problem=str(error))
    problem = None if found is not None and bytes(found) == _PROBE else "it did not give back what was written"
    memory_bytes = (tier.bytes or 0) if in_memory else 0
    return StoreFacts(name=name, problem=problem, write_ms=write_ms, read_ms=read_ms, host_memory_bytes=memory_bytes)


def _timed_ms(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1000
