"""Which tenant a credential belongs to. The request body has no say in it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from kvrelay.core.model.prompt import Tenant
from kvrelay.edge.system.sections import TenantSection

DEFAULT_TENANT = "default"


class Tenants:
    """Keys are held and looked up as keyed digests: how long a comparison takes says nothing about a key."""

    def __init__(self, sections: Mapping[str, TenantSection], *, secret: bytes) -> None:
        """`secret` decides the keys of fingerprints: equal ones make equal prefixes of a tenant show as equal.

        Raises OSError when a key or salt file cannot be read.
        """
        self._secret = secret
        self._pepper = secrets.token_bytes(32)
        self._by_digest: dict[bytes, Tenant] = {}
        self._open = Tenant(DEFAULT_TENANT, fingerprint_key=self._fingerprint_key(DEFAULT_TENANT))
        for name, section in sections.items():
            self._add(name, section)
        self.keys_required = bool(self._by_digest)

    def _add(self, name: str, section: TenantSection) -> None:
        salt = None if section.salt_file is None else section.salt_file.read_text(encoding="utf-8").strip()
        tenant = Tenant(name, fingerprint_key=self._fingerprint_key(name), salt=salt or None)
        if section.api_keys_file is None:
            if name == DEFAULT_TENANT:
                self._open = tenant
            return
        for line in section.api_keys_file.read_text(encoding="utf-8").splitlines():
            if line.strip():
                self._by_digest[self._digest(line.strip().encode())] = tenant

    def of(self, authorization: bytes | None, api_key: bytes | None = None) -> Tenant | None:
        """The tenant of an `Authorization` or else an `x-api-key` value; None: no valid key, and one is required."""
        if not self.keys_required:
            return self._open
        if authorization is None:
            return None if api_key is None else self._by_digest.get(self._digest(api_key.strip()))
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._by_digest.get(self._digest(key.strip()))

    def _fingerprint_key(self, name: str) -> bytes:
        return hashlib.blake2b(name.encode(), key=self._secret, person=b"kvr-fingerprint", digest_size=32).digest()

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._pepper, digest_size=32).digest()


class AdminToken:
    """The bearer token of the admin port; without a file every caller is let in."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def admits(self, authorization: str | None) -> bool:
        if self._token is None:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode())
