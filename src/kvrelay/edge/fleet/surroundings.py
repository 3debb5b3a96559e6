"""What the workers of a fleet share; one with TLS settings has a session of its own."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import zmq
from msgspec import Struct

from kvrelay.core.model.events import Event
from kvrelay.edge.fleet.event_sockets import EventSockets
from kvrelay.edge.fleet.observer import FleetObserver


class Surroundings(Struct):
    """`session` and `interval_s` may be replaced while the fleet runs: read them anew for every question."""

    session: aiohttp.ClientSession
    sockets: zmq.Context[zmq.Socket[bytes]]
    event_sockets: EventSockets
    feed: Callable[[Event], None]
    clock: Callable[[], float]
    observer: FleetObserver
    interval_s: float
    shares: bool = True  # unless the operator ordered all workers to leave shared tiers alone
