"""Which contracts use a store: kept in the store itself, so that a worker that never hits can be told why.

Under different contracts chunks have different names, so to a look-up the KV of a worker that differs in one field does
not exist. The register holds the first few contracts that came to a store under one tenant and secret, one per slot;
slots are written once.
"""

from __future__ import annotations

import msgspec

from kvrelay.core.contract.digest import keyed_digest
from kvrelay.core.contract.fields import Contract
from kvrelay.core.contract.identity import Namespace
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.connectors.vllm.kv.store import ChunkStore
from kvrelay.edge.stores.tiered import ChunkShape

SLOTS = 16
SLOT_BYTES = 8192
_SHAPE = ChunkShape(tokens=1, payload_bytes=SLOT_BYTES, layers=0, dtype="contract")


class ContractRegister:
    def __init__(self, store: ChunkStore, *, tenant: str, secret: bytes) -> None:
        self._store = store
        self._namespace = Namespace(contract_digest=bytes(32), tenant=tenant, tenant_key=secret, epoch=0)
        fields = (("purpose", b"contract register"), ("tenant", tenant.encode()))
        self._keys = [keyed_digest(secret[:64], [*fields, ("slot", str(i).encode())]) for i in range(SLOTS)]

    def join(self, contract: Contract) -> tuple[str, ...]:
        """Enters `contract`, and answers with the fields in which the most similar other one differs; empty when there
        is no other, or the store does not answer."""
        there = self._contracts()
        others = [other for other in there if other != contract]
        if contract not in there and len(there) < SLOTS:
            content = msgspec.json.encode(contract)
            if len(content) <= SLOT_BYTES:
                payload = memoryview(bytearray(content.ljust(SLOT_BYTES)))
                self._store.save(self._namespace, self._keys[len(there)], _SHAPE, payload, first_token=0)
        return min((contract.differing_fields(other) for other in others), key=len, default=())

    def _contracts(self) -> list[Contract]:
        there = self._store.lookup(self._namespace, self._keys, _SHAPE)
        if not there.chunks:
            return []
        into = [memoryview(bytearray(SLOT_BYTES)) for _ in range(there.chunks)]
        fetched = self._store.fetch(self._namespace, self._keys[: there.chunks], there.places, _SHAPE, into)
        found = []
        for outcome, content in zip(fetched.outcomes, into, strict=True):
            if outcome != Outcome.HIT.value:
                break
            found.append(msgspec.json.decode(content, type=Contract))
        return found
