"""The shared tier of a drill's workers: a store server in this process behind a TCP proxy, which can be spoilt.

Workers reach it as `peer://`. What all kinds of fleet have in common of it is here too.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvrelay.edge.chaos.tcp import TcpProxy
from kvrelay.edge.stores.server import StoreServer
from kvrelay.edge.stores.store import Buffer
from kvrelay.lab.drills.drill import StorePlan
from kvrelay.lab.drills.fleets.spoilt import SpoiltStore

DEADLINE_MS = 1500.0
PROBE_INTERVAL_S = 0.2
MAX_FETCHES = 4  # per worker
READ_TAKES_S = 0.02  # so that reads which could be one are seen as several
CHUNK_BLOCKS = 4


def store_options(plan: StorePlan, *, remote_url: str, below_url: str) -> dict[str, Any]:
    """As a worker's `--store` has them."""
    tiers: list[dict[str, Any]] = [{"url": remote_url, "name": "remote", "max_fetches": MAX_FETCHES}]
    if plan.below:
        tiers.append({"url": below_url, "name": "below"})
    return {
        "tiers": tiers,
        "failure_policy": plan.failure_policy,
        "deadline_ms": DEADLINE_MS,
        "break_even": False,
        "probe_interval_s": PROBE_INTERVAL_S,
    }


class _SlowlyRead(SpoiltStore):
    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        ends = self.read_begins(key)
        try:
            time.sleep(READ_TAKES_S)
            return super().read(key, deadline_s=deadline_s)
        finally:
            ends()


class SharedStore:
    """Valid between `start` and `stop`."""

    def __init__(self, plan: StorePlan, folder: Path, *, listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """`listen`: where workers that are there already look for it."""
        self._listen_host, self._listen_port = listen
        self.content: SpoiltStore = _SlowlyRead()
        self._plan = plan
        self._folder = folder

    async def start(self) -> None:
        self._server = StoreServer(self.content)
        self.network = TcpProxy(
            "127.0.0.1", self._server.port, listen_host=self._listen_host, listen_port=self._listen_port
        )
        await self.network.__aenter__()

    async def stop(self) -> None:
        await self.network.__aexit__(None, None, None)
        self._server.close()

    def options(self) -> dict[str, Any]:
        return store_options(
            self._plan,
            remote_url=f"peer://{self.network.address}",
            below_url=f"file://{(self._folder / 'below').resolve()}",
        )
