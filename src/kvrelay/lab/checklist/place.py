"""The deployment that a checklist is about: its configuration, its tiers measured now, the objects they keep."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import parse_qs, urlsplit

from msgspec import structs

from kvrelay.core.checklist.dossier import Deployment, FormatEvidence, ProbeEvidence, TierEvidence
from kvrelay.core.contract.fields import Contract
from kvrelay.core.contract.identity import Namespace, block_identities
from kvrelay.core.model.units import Tier
from kvrelay.core.sizing.memory import MemoryVerdict, judge_memory
from kvrelay.edge.connectors.lmcache.reader import DEFAULTS
from kvrelay.edge.connectors.lmcache.remote import RemoteRefused, store_url
from kvrelay.edge.connectors.lmcache.verdict import Host
from kvrelay.edge.system.config import Config
from kvrelay.edge.system.sections import StoreTier
from kvrelay.edge.system.urls import mask_credentials

LOOKED_AT = 200  # objects per tier
DEADLINE_S = 10.0
LMCACHE_KEYS = (
    "LMCache's keys carry the name of a model and not its revision, tokenizer or rope configuration: after an update "
    "under one name, old KV is hit"
)


def deployment(config: Config, *, source: str, host: Host | None) -> Deployment:
    """`host`: the machine; None: its memory is not known."""
    tiers = tuple(_tier(tier) for tier in config.store.tiers)
    roles = tuple(sorted({worker.role for worker in config.workers if worker.role}))
    memory = [
        (f"tier {named.name}", _memory(host, tier.bytes))
        for tier, named in zip(config.store.tiers, tiers, strict=True)
        if named.medium == Tier.CPU and tier.bytes is not None and host is not None
    ]
    return Deployment(sources=(source,), policy=config.gateway.policy, tiers=tiers, roles=roles, memory=tuple(memory))


def with_lmcache(known: Deployment, given: Mapping[str, Any], *, source: str, host: Host) -> Deployment:
    """A deployment whose tiers are LMCache's: `given` are the fields of its file."""
    tiers, remote = list(known.tiers), given.get("remote_url")
    memory = list(known.memory)
    size_gib = given.get("max_local_cpu_size", DEFAULTS["max_local_cpu_size"])
    if given.get("local_cpu", DEFAULTS["local_cpu"]):
        tiers.append(TierEvidence(name="local_cpu", medium=Tier.CPU.value, url="LMCache"))
        if isinstance(size_gib, int | float):
            memory.append(("max_local_cpu_size", _memory(host, host.workers * size_gib * 2**30)))
    if remote:
        tiers.append(TierEvidence(name="remote_url", medium=Tier.REMOTE.value, url=mask_credentials(str(remote))))
    return structs.replace(
        known,
        sources=(*known.sources, source),
        tiers=tuple(tiers),
        memory=tuple(memory),
        keys_lack_revision=LMCACHE_KEYS if remote else None,
    )


def probe_lmcache(remote_url: str) -> ProbeEvidence:
    """Measured as a store where we speak its protocol, else by how long a connection takes."""
    name, shown = "remote_url", mask_credentials(remote_url)
    try:
        return _probe(name, shown, store_url(remote_url))
    except RemoteRefused:
        pass
    try:
        return ProbeEvidence(tier=name, url=shown, connect_s=_connect_s(remote_url))
    except OSError as problem:
        return ProbeEvidence(tier=name, url=shown, problem=str(problem))


def _connect_s(url: str) -> float:
    """Raises OSError."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as problem:
        raise OSError(str(problem)) from problem
    if host is None or port is None:
        raise OSError("it names no host and port")
    began_s = time.perf_counter()
    with socket.create_connection((host, port), timeout=DEADLINE_S):
        return time.perf_counter() - began_s


def _tier(tier: StoreTier) -> TierEvidence:
    return TierEvidence(
        name=tier.name or tier.url.partition(":")[0], medium=_medium(tier.url), url=mask_credentials(tier.url)
    )


def _medium(url: str) -> str:
    from kvrelay.edge.stores.config import medium_of  # needs what stores need

    return medium_of(url).value


def _memory(host: Host, asked_bytes: float) -> MemoryVerdict:
    gib = 2.0**30
    return judge_memory(
        host_bytes=host.memory_gib * gib,
        engine_bytes=host.workers * host.engine_gib * gib,
        buffer_bytes=host.buffer_gib * gib,
        asked_bytes=asked_bytes,
    )


def probe_tiers(tiers: Sequence[StoreTier]) -> tuple[ProbeEvidence, ...]:
    """Writes two objects to every shared tier, reads them, deletes them. Never raises for what a tier does."""
    named = [(_tier(tier), tier.url) for tier in tiers]
    return tuple(_probe(tier.name, tier.url, url) for tier, url in named if tier.medium != Tier.CPU)


def _probe(name: str, shown: str, url: str) -> ProbeEvidence:
    from kvrelay.edge.stores.config import StoreConfigError
    from kvrelay.edge.stores.store import StoreError
    from kvrelay.lab.sizing.live import measure_store

    try:
        return ProbeEvidence(tier=name, url=shown, link=measure_store(url), connect_s=_to_endpoint_s(url))
    except (StoreError, StoreConfigError, OSError) as problem:
        return ProbeEvidence(tier=name, url=shown, problem=str(problem))


def _to_endpoint_s(url: str) -> float | None:
    """Of an object store whose URL names its endpoint; None for others, where a small read is a round trip."""
    parts = urlsplit(url)
    endpoint = parse_qs(parts.query).get("endpoint", [""])[0]
    return _connect_s(endpoint) if parts.scheme == "s3" and endpoint else None


def look_at_formats(tiers: Sequence[StoreTier]) -> tuple[FormatEvidence, ...]:
    """Reads the heads of some objects in every tier that outlives a process."""
    return tuple(_formats(tier) for tier in tiers if _medium(tier.url) != Tier.CPU)


def _formats(tier: StoreTier) -> FormatEvidence:
    from kvrelay.core.tiers.outcome import Outcome
    from kvrelay.edge.stores.audit import inspect
    from kvrelay.edge.stores.config import StoreConfigError, open_store
    from kvrelay.edge.stores.store import StoreError

    name = _tier(tier).name
    try:
        store = open_store(tier.url, deadline_s=DEADLINE_S)
        try:
            seen = list(islice(inspect(store, deadline_s=DEADLINE_S, payloads=False), LOOKED_AT))
        finally:
            store.close()
    except (StoreError, StoreConfigError, OSError) as problem:
        return FormatEvidence(tier=name, looked_at=0, problem=str(problem))
    foreign = Counter(one.detail for one in seen if one.outcome is Outcome.REFUSED)
    return FormatEvidence(tier=name, looked_at=len(seen), foreign=tuple(sorted(foreign.items())))


def contract_blind() -> tuple[str, ...]:
    """Members of the contract that leave a block's identity as it is when they change: tried with made-up values."""
    import numpy as np

    tokens = np.arange(16, dtype=np.uint32)
    values = {name: 16 if name == "block_size" else "a" for name in Contract.__struct_fields__}

    def identity(contract: Contract) -> bytes:
        namespace = Namespace(contract.digest(), contract.tenant_namespace, b"checklist", 0)
        return block_identities(namespace, tokens, 16)[0]

    own = Contract.from_mapping(values, source="checklist")
    others = {name: structs.replace(own, **{name: 32 if name == "block_size" else "b"}) for name in values}
    return tuple(name for name, other in others.items() if identity(other) == identity(own))
