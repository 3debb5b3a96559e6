"""Store identities: 256 bits, keyed per tenant, disjoint for every difference in the namespace."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from kvrelay.core.contract.identity import Namespace, block_identities

NAMESPACE = Namespace(contract_digest=b"c" * 32, tenant="a", tenant_key=b"secret", epoch=1)
TOKENS = np.arange(64, dtype=np.uint32)


def test_one_identity_per_full_block_each_naming_the_chain_before_it():
    whole, longer = block_identities(NAMESPACE, TOKENS, 16), block_identities(NAMESPACE, np.append(TOKENS, 7), 16)
    assert len(whole) == 4 and all(len(identity) == 32 for identity in whole) and whole == longer
    changed = TOKENS.copy()
    changed[0] += 1
    assert not set(whole) & set(block_identities(NAMESPACE, changed, 16))


def test_every_member_of_the_namespace_separates():
    other = {
        "contract_digest": b"d" * 32,
        "tenant": "b",
        "tenant_key": b"other",
        "epoch": 2,
        "adapter": "a",
    }
    variants = [structs.replace(NAMESPACE, **{name: value}) for name, value in other.items()]
    identities = [block_identities(n, TOKENS, 16)[0] for n in [NAMESPACE, *variants]]
    identities += [block_identities(NAMESPACE, TOKENS, 16, media=["x"])[0], block_identities(NAMESPACE, TOKENS, 8)[0]]
    assert len(set(identities)) == 8


def test_the_tenant_key_is_not_shown():
    assert "secret" not in repr(NAMESPACE)
