"""One backend, all else equal, only the revision is called otherwise: what was stored before is not there any more."""

from __future__ import annotations

import pytest
from msgspec import structs

from kvrelay.core.contract.fields import Contract
from kvrelay.core.contract.identity import Namespace, block_identities
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.tiered import TieredStore
from kvrelay.edge.worker.kv_store import own_contract
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.stores.test_tiered import SHAPE, payload

TOKENS = list(range(3 * SHAPE.tokens))


def namespace(contract: Contract) -> Namespace:
    return Namespace(contract.digest(), contract.tenant_namespace, b"", 0)


@pytest.mark.covers("SG-21")
def test_a_renamed_revision_alone_is_a_world_of_its_own() -> None:
    """Block hashes of engines know tokens and not revisions, so the names alone would meet. In ours they cannot: not by
    a look-up, and not by asking for the very objects of the old revision under the new one."""
    backend = MemoryStore()
    old = own_contract(MockSpec())
    new = structs.replace(old, model_revision=f"{old.model_revision}-renamed")
    store = TieredStore.open(
        {"tiers": [{"url": "memory://", "name": "shared"}], "deadline_ms": 2000, "break_even": False}, stores=[backend]
    )
    keys = block_identities(namespace(old), TOKENS, SHAPE.tokens)
    for number, key in enumerate(keys):
        assert store.store(namespace(old), key, SHAPE, [payload(number)], start_token=SHAPE.tokens * number).stored
    renamed = block_identities(namespace(new), TOKENS, SHAPE.tokens)
    assert not set(keys) & set(renamed)
    assert len(store.lookup(namespace(old), keys, SHAPE).keys) == 3
    assert store.lookup(namespace(new), renamed, SHAPE).keys == ()
    borrowed = store.plan(namespace(new), keys, SHAPE)
    into = [bytearray(SHAPE.payload_bytes) for _ in keys]
    assert store.fetch(borrowed, [memoryview(buffer) for buffer in into]).leading_hits == 0
    store.close()
