"""Tagged digests: a value is hashed together with the name of what it is.

Two fields with the same bytes must never be interchangeable: an adapter called like a salt is not that salt, and
("ab", "c") is not ("a", "bc"). So every field goes in as length, tag, length, value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

Field = tuple[str, bytes]


def encode_fields(fields: Iterable[Field]) -> bytes:
    """An injective encoding of tagged values, in the order given."""
    parts: list[bytes] = []
    for tag, value in fields:
        name = tag.encode()
        parts += (len(name).to_bytes(2, "big"), name, len(value).to_bytes(8, "big"), value)
    return b"".join(parts)


def keyed_digest(key: bytes, fields: Iterable[Field], *, digest_bytes: int = 32) -> bytes:
    """BLAKE2b (RFC 7693) in its keyed mode over tagged fields. `key` has at most 64 bytes and may be empty."""
    return hashlib.blake2b(encode_fields(fields), key=key, digest_size=digest_bytes).digest()
