"""A name for a prefix that shows equality within a tenant and nothing else."""

from __future__ import annotations

from hashlib import blake2b

from kvrelay.core.model.prompt import Tenant


def prefix_fingerprint(tenant: Tenant, block_size_tokens: int, last_key: int) -> str:
    """Sixteen hex digits: BLAKE2b keyed with the tenant's secret, over fields of fixed width and the tenant's name."""
    content = block_size_tokens.to_bytes(4, "big") + last_key.to_bytes(8, "big") + tenant.name.encode()
    return blake2b(content, key=tenant.fingerprint_key[:64], digest_size=8, person=b"kvrelay-prefix").hexdigest()
