"""What a stored object says about itself, and whether that is what was asked for.

The bytes of the header are the associated data of the cipher, so that under encryption no member of it can be exchanged
without the payload failing to decrypt; without encryption a checksum over the head finds damage, and the key itself (a
keyed digest over contract, tenant, epoch and token chain) is what nobody can aim at.
"""

from __future__ import annotations

from operator import attrgetter

from msgspec import Struct

from kvrelay.core.tiers.outcome import Outcome

FORMAT_VERSION = 1
CIPHER_NONE = "none"
WHOLE, PIECE, MANIFEST = "whole", "piece", "manifest"
_JUDGED_BY = ("contract_digest", "key", "tenant_tag", "epoch", "role", "piece", "dtype")
_judged_by = attrgetter(*_JUDGED_BY)


class ObjectHeader(Struct, frozen=True, kw_only=True, array_like=True):
    """One object: a chunk of one sequence's KV, a piece of one, or the manifest of its pieces."""

    contract_digest: bytes  # 32 bytes
    key: bytes  # 32 bytes, see `core/contract/identity.py`
    tenant_tag: bytes  # 8 bytes; says which tenant without saying its name
    epoch: int
    start_token: int
    end_token: int  # exclusive
    layers: int
    dtype: str
    shape: tuple[int, ...]
    plain_bytes: int  # of the payload before codec and cipher
    codec: str
    cipher: str
    key_id: str
    created_s: float  # Unix time
    expires_s: float | None
    role: str = WHOLE
    piece: int = 0  # of a piece: its place; of a manifest: how many there are


class Expected(Struct, frozen=True, kw_only=True):
    """What a reader demands. `plain_bytes` is what its destination holds."""

    contract_digest: bytes
    key: bytes
    tenant_tag: bytes
    epoch: int
    plain_bytes: int | None = None
    dtype: str | None = None
    role: str = WHOLE
    piece: int = 0


def judge(header: ObjectHeader, expected: Expected, *, now_s: float) -> tuple[Outcome, str]:
    """`hit` if the header is the one asked for, else what it is instead and in which member. Says nothing about the
    payload. `now_s` is Unix time."""
    found, wanted = _judged_by(header), _judged_by(expected)
    if found != wanted:
        for name, one, other in zip(_JUDGED_BY, found, wanted, strict=True):
            unasked = other is None or (name == "piece" and expected.role == MANIFEST)
            if not unasked and one != other:
                return Outcome.FOREIGN, name
    if expected.plain_bytes is not None and header.plain_bytes != expected.plain_bytes:
        return Outcome.FOREIGN, "plain_bytes"
    if header.expires_s is not None and header.expires_s <= now_s:
        return Outcome.EXPIRED, "expires_s"
    return Outcome.HIT, ""
