"""Block identities for stores: 256-bit keyed digests that nobody can guess across tenants.

Identity = contract digest + tenant salt + epoch + adapter + media + the whole token chain before the block. Slower than
`keys.py` (about a microsecond per block) and used only where bytes are written or read under the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvrelay.core.contract.digest import Field, encode_fields, keyed_digest
from kvrelay.core.model.prompt import TokenIds


class Namespace(Struct, frozen=True):
    """Where a chain of blocks belongs. Changing any member gives a disjoint set of identities."""

    contract_digest: bytes
    tenant: str
    tenant_key: bytes  # secret; makes names unguessable for other tenants
    epoch: int
    adapter: str | None = None

    def __repr__(self) -> str:
        return f"Namespace(tenant={self.tenant!r}, epoch={self.epoch}, adapter={self.adapter!r})"


def block_identities(
    namespace: Namespace,
    token_ids: TokenIds,
    block_size_tokens: int,
    *,
    media: Sequence[str | None] | None = None,
    parent: bytes | None = None,
) -> tuple[bytes, ...]:
    """One 32-byte identity per full block, each naming the whole chain up to it.

    `parent`: the identity of the block before these tokens, for a chain that grows; None: they begin the chain.
    """
    parent = _root(namespace, block_size_tokens) if parent is None else parent
    tokens = np.ascontiguousarray(token_ids, dtype="<u4")
    identities: list[bytes] = []
    for i in range(len(tokens) // block_size_tokens):
        fields: list[Field] = [
            ("parent", parent),
            ("tokens", tokens[i * block_size_tokens :][:block_size_tokens].tobytes()),
        ]
        if media is not None and i < len(media) and (digest := media[i]) is not None:
            fields.append(("media", digest.encode()))
        parent = hashlib.blake2b(encode_fields(fields), key=namespace.tenant_key[:64], digest_size=32).digest()
        identities.append(parent)
    return tuple(identities)


def _root(namespace: Namespace, block_size_tokens: int) -> bytes:
    fields: list[Field] = [
        ("contract", namespace.contract_digest),
        ("tenant", namespace.tenant.encode()),
        ("epoch", str(namespace.epoch).encode()),
        ("block_size", str(block_size_tokens).encode()),
    ]
    if namespace.adapter is not None:
        fields.append(("adapter", namespace.adapter.encode()))
    return keyed_digest(namespace.tenant_key[:64], fields)
