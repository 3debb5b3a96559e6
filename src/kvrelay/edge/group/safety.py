"""What a group refuses before any process is started, or asked to take a change."""

from __future__ import annotations

import ssl

from kvrelay.edge.fleet.static import worker_access
from kvrelay.edge.gateway.auth import Tenants
from kvrelay.edge.gateway.gateway import load_certificate
from kvrelay.edge.gateway.safety import refuse_unsafe_listeners
from kvrelay.edge.system.config import Config, WorkerConfig


def refuse_bound_events(worker: WorkerConfig) -> None:
    """An address can be bound by one process only, and the others would hear nothing. Raises ValueError."""
    if worker.events.startswith("bind:"):
        raise ValueError(
            f"`events` of worker `{worker.name}` is `{worker.events}`: of several processes each subscribes for itself,"
            " and only one of them could bind that address; legal: an address of the worker, `auto` or `none`"
        )


def refuse_unusable(config: Config) -> None:
    """What each process would refuse. Raises UnsafeListener, OSError or ValueError."""
    refuse_unsafe_listeners(config)
    Tenants(config.tenants, secret=bytes(32))
    for worker in config.workers:
        refuse_bound_events(worker)
        worker_access(worker)
    if config.gateway.tls_cert is not None:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)
