"""`python -m tests.lab.drills.plain_relay PORT URL...`: passes everything on to the first worker, byte by byte."""

from __future__ import annotations

import asyncio
import sys
from urllib.parse import urlsplit

from kvrelay.edge.chaos.tcp import TcpProxy


async def main() -> None:
    worker = urlsplit(sys.argv[2])
    async with TcpProxy(worker.hostname or "", worker.port or 80, listen_port=int(sys.argv[1])):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
