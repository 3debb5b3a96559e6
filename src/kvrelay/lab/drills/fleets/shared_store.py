"""The shared tier of a drill's workers: a store server in this process behind a TCP proxy, which can be spoilt.

Workers reach it as `peer://`. What is spoilt is what they read, never what they wrote: a drill that mends the store has
the same objects as before.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrelay.edge.chaos.tcp import TcpProxy
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.server import StoreServer
from kvrelay.edge.stores.store import Buffer
from kvrelay.edge.stores.wrappers import Wrapped
from kvrelay.lab.drills.drill import StorePlan

DEADLINE_MS = 1500.0
PROBE_INTERVAL_S = 0.2
MAX_FETCHES = 4  # per worker
READ_TAKES_S = 0.02  # so that reads which could be one are seen as several
CHUNK_BLOCKS = 4


class SpoiltStore(Wrapped):
    """`how`: None, `truncated` (half of each object), `damaged` (one bit), `phantom` (known, and not there)."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.how: str | None = None
        self.reads: Counter[bytes] = Counter()
        self.most_reads_at_once = 0
        self._running = 0
        self._counting = threading.Lock()

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        with self._counting:
            self.reads[key] += 1
            self._running += 1
            self.most_reads_at_once = max(self.most_reads_at_once, self._running)
        try:
            time.sleep(READ_TAKES_S)
            return self._spoilt(self.inner.read(key, deadline_s=deadline_s))
        finally:
            with self._counting:
                self._running -= 1

    def _spoilt(self, found: Buffer | None) -> Buffer | None:
        if found is None or self.how is None:
            return found
        content = bytearray(found)
        match self.how:
            case "truncated":
                return content[: len(content) // 2]
            case "damaged":
                content[-1] ^= 1
                return content
            case "phantom":
                return None
        raise AssertionError(f"no such damage: {self.how}")

    def wipe(self) -> None:
        self.inner = MemoryStore()

    def begin_counting(self) -> None:
        with self._counting:
            self.reads.clear()
            self.most_reads_at_once = 0

    def objects(self) -> Sequence[bytes]:
        return [info.key for info in self.inner.scan(deadline_s=5.0)]


class SharedStore:
    """Valid between `start` and `stop`."""

    def __init__(self, plan: StorePlan, folder: Path) -> None:
        self.content = SpoiltStore()
        self._plan = plan
        self._folder = folder

    async def start(self) -> None:
        self._server = StoreServer(self.content)
        self.network = TcpProxy("127.0.0.1", self._server.port)
        await self.network.__aenter__()

    async def stop(self) -> None:
        await self.network.__aexit__(None, None, None)
        self._server.close()

    def options(self) -> dict[str, Any]:
        """As a worker's `--store` has them."""
        tiers: list[dict[str, Any]] = [
            {"url": f"peer://{self.network.address}", "name": "remote", "max_fetches": MAX_FETCHES}
        ]
        if self._plan.below:
            tiers.append({"url": f"file://{(self._folder / 'below').resolve()}", "name": "below"})
        return {
            "tiers": tiers,
            "failure_policy": self._plan.failure_policy,
            "deadline_ms": DEADLINE_MS,
            "break_even": False,
            "probe_interval_s": PROBE_INTERVAL_S,
        }

    def figures(self) -> dict[str, int]:
        """For the history."""
        return {
            "objects": len(self.content.objects()),
            "most_reads_at_once": self.content.most_reads_at_once,
            "most_reads_of_one": max(self.content.reads.values(), default=0),
        }
