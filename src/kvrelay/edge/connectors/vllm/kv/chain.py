"""The names of one request's chunks: contract, tenant, salt, epoch, adapter, media and every token before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from kvrelay.core.contract.digest import keyed_digest
from kvrelay.core.contract.identity import Namespace, block_identities


class Medium(Struct, frozen=True):
    """An image, a sound: its digest and which tokens of the prompt stand for it."""

    digest: str
    first_token: int
    tokens: int


def namespace_for(
    *, contract_digest: bytes, tenant: str, secret: bytes, epoch: int, salt: str | None, adapter: str | None
) -> Namespace:
    """Where a request belongs. A salt makes a key of its own, and shows in the tenant's name only as a digest."""
    if salt is None:
        key, name = secret, tenant
    else:
        key = keyed_digest(secret[:64], [("tenant", tenant.encode()), ("salt", salt.encode())])
        name = f"{tenant}/{keyed_digest(key, [('purpose', b'tag')], digest_bytes=8).hex()}"
    return Namespace(contract_digest=contract_digest, tenant=name, tenant_key=key, epoch=epoch, adapter=adapter)


def media_by_chunk(media: Iterable[Medium], *, chunks: int, chunk_tokens: int) -> list[str | None]:
    """For each chunk, what lies in it and where; None where only tokens do."""
    found: list[list[str]] = [[] for _ in range(chunks)]
    for medium in media:
        first, last = medium.first_token // chunk_tokens, (medium.first_token + medium.tokens - 1) // chunk_tokens
        for chunk in range(first, min(last + 1, chunks)):
            found[chunk].append(f"{medium.digest}@{medium.first_token - chunk * chunk_tokens}")
    return ["\n".join(names) if names else None for names in found]


class Chain:
    """Chunk names of a sequence that grows. Computed as far as somebody asks."""

    def __init__(self, namespace: Namespace, chunk_tokens: int, media: Sequence[Medium] = ()) -> None:
        self.namespace = namespace
        self._chunk_tokens = chunk_tokens
        self._media = media
        self._keys: tuple[bytes, ...] = ()

    def keys(self, token_ids: Sequence[int], chunks: int) -> tuple[bytes, ...]:
        """Names of the first `chunks` chunks; the sequence must only ever grow."""
        known = len(self._keys)
        if chunks > known:
            size = self._chunk_tokens
            tokens = np.array(token_ids[known * size : chunks * size], dtype=np.uint32)
            media = media_by_chunk(self._media, chunks=chunks, chunk_tokens=size)[known:] if self._media else None
            parent = self._keys[-1] if known else None
            self._keys += block_identities(self.namespace, tokens, size, media=media, parent=parent)
        return self._keys[:chunks]


def rank_key(key: bytes, rank: int, ranks: int) -> bytes:
    """The name of what one of several ranks holds of a chunk. A single rank holds the whole of it."""
    if ranks == 1:
        return key
    return hashlib.blake2b(key, key=b"kvrelay-rank", salt=f"{rank}/{ranks}".encode()[:16], digest_size=32).digest()
