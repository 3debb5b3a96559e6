"""Listeners beyond loopback are protected, or do not start."""

from __future__ import annotations

from kvrelay.edge.system.config import Config

LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))


class UnsafeListener(Exception):
    """A listener beyond loopback without what protects it. The message says which and what would do."""


def refuse_unsafe_listeners(config: Config) -> None:
    """Raises UnsafeListener; `insecure = true` lets everything pass."""
    gateway = config.gateway
    if gateway.insecure:
        return
    keyed = any(tenant.api_keys_file is not None for tenant in config.tenants.values())
    if gateway.host not in LOOPBACK and not (gateway.tls_cert is not None and keyed):
        raise UnsafeListener(
            f"`gateway.host` is `{gateway.host}`, beyond loopback, without TLS (tls_cert, tls_key) and API keys"
            " (tenants.NAME.api_keys_file)"
        )
    if gateway.admin_host not in LOOPBACK:
        raise UnsafeListener(
            f"`gateway.admin_host` is `{gateway.admin_host}`, beyond loopback, and the admin port has no TLS"
        )
