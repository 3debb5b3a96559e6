"""A client and a server over plain sockets, so that tests decide every byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.edge.http.limits import HttpLimits
from kvrelay.edge.http.server import Handler, HttpServer, start_server


@asynccontextmanager
async def serving(handler: Handler, limits: HttpLimits | None = None) -> AsyncIterator[HttpServer]:
    server = await start_server(handler, host="127.0.0.1", port=0, limits=limits)
    try:
        yield server
    finally:
        await server.close()
        await asyncio.sleep(0.01)  # the test's own sockets close in later turns of the loop


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def send_and_read(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send the pieces, then read until the server closes or falls silent."""
    reader, writer = await connect(port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pause_s)
    received = b""
    try:
        async with asyncio.timeout(0.3):
            while data := await reader.read(65536):
                received += data
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return received
