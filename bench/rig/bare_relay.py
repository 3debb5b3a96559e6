"""The least that can stand between a client and a worker: bytes in, the same bytes out. It shows what a machine costs.

python -m bench.rig.bare_relay URL      prints {"url": ...}, runs until its input closes
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

from kvrelay.edge.system.urls import host_and_port


class Side(asyncio.Protocol):
    """One end; what it receives goes out at the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class ClientSide(Side):
    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._address = (host, port)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        _, worker = await asyncio.get_running_loop().create_connection(Side, *self._address)
        worker.other, self.other = self, worker
        for data in self.early:
            self.data_received(data)


async def main() -> None:
    loop = asyncio.get_running_loop()
    host, port = host_and_port(sys.argv[1])
    server = await loop.create_server(lambda: ClientSide(host, port), "127.0.0.1", 0)
    sys.stdout.write(json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}) + "\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(main())
