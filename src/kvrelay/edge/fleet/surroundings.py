"""What all workers of a fleet share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import aiohttp
import zmq

from kvrelay.core.model.events import Event
from kvrelay.edge.fleet.observer import FleetObserver


class Surroundings(NamedTuple):
    session: aiohttp.ClientSession
    sockets: zmq.Context[zmq.Socket[bytes]]
    feed: Callable[[Event], None]
    clock: Callable[[], float]
    observer: FleetObserver
    interval_s: float
