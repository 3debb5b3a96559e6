"""Mock workers of an arm that share KV: what they are started with, and how what they stored goes away again.

Every arm has a namespace of its own in its tiers, so nothing that an earlier arm stored can be hit, and nothing that
lies there already is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvrelay.core.model.units import Tier
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.arms.contender import Contender, plain_key

DEADLINE_S = 5.0


def equipped(specs: Iterable[MockSpec], contender: Contender) -> list[MockSpec]:
    """The specs as they are for a contender without tiers."""
    if contender.store is None:
        return list(specs)
    namespace = f"{contender.name}@{time.time_ns()}"
    store: dict[str, Any] = dict(contender.store)
    return [
        msgspec.structs.replace(spec, store=store, contract={**spec.contract, "tenant_namespace": namespace})
        for spec in specs
    ]


@asynccontextmanager
async def mock_fleet(
    specs: Iterable[MockSpec], contender: Contender, *, ready_timeout_s: float
) -> AsyncIterator[MockFleet]:
    """Fresh workers as the contender wants them; they end, and what they stored goes, when the context is left."""
    own = equipped(specs, contender)
    try:
        async with MockFleet(own, ready_timeout_s=ready_timeout_s) as fleet:
            yield fleet
    finally:
        await asyncio.to_thread(forget, own)


def media(started: Mapping[str, Any]) -> tuple[str, ...]:
    """What the tiers in a flat configuration lie on, nearest first: `cpu`, and `remote` for all that is not this host's
    memory."""
    from kvrelay.edge.stores.config import medium_of

    urls = [str(value) for key, value in started.items() if plain_key(key) == "store.tiers.url"]
    return tuple(dict.fromkeys("cpu" if medium_of(url) is Tier.CPU else "remote" for url in urls))


def forget(specs: Sequence[MockSpec]) -> None:
    """Delete what these workers stored, and nothing else. A tier that does not answer keeps it: nobody else can hit it,
    and it is evicted in time."""
    if not specs or specs[0].store is None:
        return
    from kvrelay.edge.stores.audit import purge
    from kvrelay.edge.stores.config import StoreConfig, open_store
    from kvrelay.edge.stores.contracts import PREFIX
    from kvrelay.edge.stores.store import StoreError
    from kvrelay.edge.worker.kv_store import own_contract

    digest = own_contract(specs[0]).digest()
    for tier in StoreConfig.from_mapping(specs[0].store, source="the arm").tiers:
        with contextlib.suppress(StoreError, OSError):
            store = open_store(tier.url, deadline_s=DEADLINE_S)
            with contextlib.closing(store):
                purge(
                    store,
                    tier.url,
                    "an arm's own",
                    lambda one: one.header is not None and one.header.contract_digest == digest,
                    deadline_s=DEADLINE_S,
                )
                store.delete([PREFIX + digest], deadline_s=DEADLINE_S)
