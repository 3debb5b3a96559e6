"""What both sides of the relay ask of a fresh connection."""

from __future__ import annotations

import asyncio
import socket
from typing import cast


def prepared(transport: asyncio.BaseTransport, *, write_buffer_bytes: int) -> asyncio.Transport:
    """The transport with our bound on unsent bytes and without Nagle's delay, which would hold back single tokens."""
    ready = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it
    ready.set_write_buffer_limits(high=write_buffer_bytes)
    raw = ready.get_extra_info("socket")
    if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ready
