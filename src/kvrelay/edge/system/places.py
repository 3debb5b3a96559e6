"""Where the configuration says that the gateway and its workers are."""

from __future__ import annotations

from kvrelay.core.model.place import Place
from kvrelay.edge.system.sections import GatewaySection, WorkerConfig
from kvrelay.edge.system.urls import host_and_port, is_loopback

_OWN_HOST = "localhost"


def place_of_gateway(config: GatewaySection) -> Place:
    return Place(_OWN_HOST, config.rack, config.zone)


def place_of_worker(config: WorkerConfig) -> Place:
    """A loopback address is on our own host; of any other the address itself tells nothing about how far it is."""
    host, _ = host_and_port(config.url)
    return Place(_OWN_HOST if is_loopback(host) else host, config.rack, config.zone)
