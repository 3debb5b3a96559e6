"""Contracts under which objects were stored, written beside them, so that a reader without hits can be told why.

A key says nothing about what it was made of. Each writer therefore leaves its contract, once, under the contract's
digest; a reader compares it with its own and names the members that differ. The tenant's namespace is kept as a digest
only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from msgspec import Struct, structs

from kvrelay.core.contract.digest import keyed_digest
from kvrelay.core.contract.fields import Contract
from kvrelay.core.tiers.header import Expected, ObjectHeader
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.keys import KeyRing
from kvrelay.edge.stores.object import HEAD_BYTES, Head, Owner, parse_head, seal, unpack
from kvrelay.edge.stores.store import Store, WriteOutcome

PREFIX = b"contract"  # in the place of a tenant's tag
_NOBODY = Owner(PREFIX, b"", 0)
_PLAIN = KeyRing({})


class OtherContract(Struct, frozen=True):
    """A contract in a store, and how it differs from the reader's: member -> (stored, the reader's)."""

    digest: bytes
    differs: dict[str, tuple[object, object]]
    written_s: float  # Unix time


def write_contract(store: Store, contract: Contract, *, deadline_s: float) -> WriteOutcome:
    """Leave the contract in a store."""
    payload = msgspec.json.encode(_public(contract))
    digest = contract.digest()
    header = ObjectHeader(
        contract_digest=digest,
        key=digest,
        tenant_tag=PREFIX,
        epoch=0,
        start_token=0,
        end_token=0,
        layers=0,
        dtype="json",
        shape=(),
        plain_bytes=len(payload),
        codec="raw",
        cipher="",
        key_id="",
        created_s=time.time(),
        expires_s=None,
    )
    parts = seal(header, [payload], ring=_PLAIN, owner=_NOBODY)
    return store.write(PREFIX + digest, parts, only_if_absent=True, deadline_s=deadline_s)


def other_contracts(store: Store, mine: Contract, *, deadline_s: float) -> Iterator[OtherContract]:
    """Every sound contract in a store that is not the reader's own."""
    own, own_digest = structs.asdict(_public(mine)), mine.digest()
    for info in store.scan(PREFIX, deadline_s=deadline_s):
        digest = info.key[len(PREFIX) :]
        found = None if digest == own_digest else _read(store, digest, deadline_s=deadline_s)
        if found is None:
            continue
        head, theirs = found
        stored = structs.asdict(theirs)
        differs = {name: (stored[name], own[name]) for name in own if stored[name] != own[name]}
        yield OtherContract(digest, differs, head.header.created_s)


def nearest_difference(store: Store, mine: Contract, *, deadline_s: float) -> tuple[str, ...]:
    """The members in which the most similar contract of others differs; empty when there is no other."""
    others = (tuple(other.differs) for other in other_contracts(store, mine, deadline_s=deadline_s))
    return min(others, key=len, default=())


def _read(store: Store, digest: bytes, *, deadline_s: float) -> tuple[Head, Contract] | None:
    data = store.read(PREFIX + digest, deadline_s=deadline_s)
    head = parse_head(memoryview(data or b"").cast("B"))
    if data is None or not isinstance(head, Head):
        return None
    into = memoryview(bytearray(head.payload_bytes))
    expected = Expected(contract_digest=digest, key=digest, tenant_tag=PREFIX, epoch=0)
    payload = memoryview(data).cast("B")[HEAD_BYTES:]
    verdict = unpack(head, payload, into, expected=expected, ring=_PLAIN, owner=_NOBODY, now_s=time.time())
    if verdict.outcome is not Outcome.HIT:
        return None
    try:
        return head, msgspec.json.decode(into, type=Contract)
    except msgspec.MsgspecError:
        return None


def _public(contract: Contract) -> Contract:
    """What others may read: that two tenants are the same or not, and no tenant's name."""
    hidden = keyed_digest(b"", [("tenant_namespace", contract.tenant_namespace.encode())], digest_bytes=8).hex()
    return structs.replace(contract, tenant_namespace=hidden)
