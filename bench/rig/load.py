"""Closed loops: each connection sends its next request when the last one is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from msgspec import Struct

from kvrelay.core.model.units import Fault
from kvrelay.edge.http.client import CallTimeouts, Origin, UpstreamPool
from kvrelay.edge.http.heads import Header
from kvrelay.edge.system.urls import host_and_port


class Load(Struct, frozen=True):
    """What one run of the generator did."""

    requests: int
    chunks: int
    wall_s: float
    latencies_s: list[float] = []

    def percentile_ms(self, percent: int) -> float:
        """Of the time from sending a request to the end of its answer."""
        return sorted(self.latencies_s)[max(0, len(self.latencies_s) * percent // 100 - 1)] * 1e3


class _Loop:
    """One connection's closed loop."""

    def __init__(self, pool: UpstreamPool, origin: Origin, payloads: Iterator[bytes], done: asyncio.Semaphore) -> None:
        self._pool = pool
        self._origin = origin
        self._payloads = payloads
        self._done = done
        self.chunks = 0
        self.latencies_s: list[float] = []
        self._sent_at = 0.0

    def next(self) -> None:
        payload = next(self._payloads, None)
        if payload is None:
            self._done.release()
        else:
            self._sent_at = time.perf_counter()
            self._pool.request(self._origin, payload, self, CallTimeouts())

    def on_accepted(self) -> None:
        return

    def on_interim(self, status: int, headers: list[Header]) -> None:
        return

    def on_head(self, status: int, headers: list[Header]) -> None:
        assert status == 200, (status, headers)

    def on_data(self, data: bytes) -> None:
        self.chunks += data.count(b"data: {")

    def on_end(self) -> None:
        self.latencies_s.append(time.perf_counter() - self._sent_at)
        self.next()

    def on_error(self, fault: Fault, detail: str) -> None:
        raise AssertionError(f"{fault}: {detail}")


async def drive(url: str, payloads: Iterator[bytes], *, connections: int) -> Load:
    """Send every payload once, over so many connections."""
    host, port = host_and_port(url)
    pool = UpstreamPool()
    done = asyncio.Semaphore(0)
    loops = [_Loop(pool, Origin(host, port), payloads, done) for _ in range(connections)]
    began = time.perf_counter()
    for each in loops:
        each.next()
    for _ in loops:
        await done.acquire()
    wall_s = time.perf_counter() - began
    pool.close()
    latencies_s = [latency for each in loops for latency in each.latencies_s]
    return Load(len(latencies_s), sum(each.chunks for each in loops), wall_s, latencies_s)


def post(path: str, body: bytes) -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\naccept: */*\r\n"
        b"user-agent: bench\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
    )
