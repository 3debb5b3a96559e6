"""What a request leaves behind is freed by reference count: `kvrelay serve` lets the garbage collector rest on that.

The workers are a process of their own, and the client is the upstream pool, so whatever is found is of our making.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvrelay.core.model.units import Fault
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.http.client import CallTimeouts, Origin, UpstreamPool
from kvrelay.edge.http.heads import Header
from kvrelay.edge.system.config import load_config
from kvrelay.edge.system.urls import host_and_port
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.scripted import gauges_are_zero, until
from tests.garbage import found_garbage

REQUESTS, CONNECTIONS = 1000, 8
WARM_UP = 50
SPECS = [MockSpec(name=name, prefill_tokens_per_s=1e7, decode_ms=0.0, step_overhead_ms=0.0) for name in ("a", "b", "c")]
FAILING: tuple[dict[str, object], ...] = ({"kind": "500", "probability": 0.3}, {"kind": "refuse", "probability": 0.3})


class _Asker:
    """One connection's closed loop; `leaves` closes it at the first byte of each answer."""

    def __init__(self, pool: UpstreamPool, origin: Origin, payloads: Iterator[bytes], leaves: bool) -> None:
        self.done = asyncio.Event()
        self._pool, self._origin, self._payloads, self._leaves = pool, origin, payloads, leaves

    def next(self) -> None:
        payload = next(self._payloads, None)
        if payload is None:
            self.done.set()
        else:
            self._call = self._pool.request(self._origin, payload, self, CallTimeouts())

    def on_accepted(self) -> None:
        return

    def on_interim(self, status: int, headers: list[Header]) -> None:
        return

    def on_head(self, status: int, headers: list[Header]) -> None:
        return

    def on_data(self, data: bytes) -> None:
        if self._leaves:
            self._call.abort()
            self.next()

    def on_end(self) -> None:
        self.next()

    def on_error(self, fault: Fault, detail: str) -> None:
        self.next()


@pytest.fixture(scope="module")
def fleet() -> Iterator[MockFleet]:
    with MockFleet(SPECS) as fleet:
        yield fleet


async def switch_faults(fleet: MockFleet, faults: tuple[dict[str, object], ...]) -> None:
    async with aiohttp.ClientSession() as session:
        for worker in fleet.workers:
            await session.delete(f"{worker.url}/mock/faults")
            for fault in faults:
                await session.post(f"{worker.url}/mock/faults", json=fault)


@asynccontextmanager
async def serving(fleet: MockFleet, policy: str) -> AsyncIterator[Gateway]:
    settings = {
        "workers": [{"name": worker.name, "url": worker.url, "adapter": "mock"} for worker in fleet.workers],
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "gateway.policy": policy,
        "health.interval_s": 3600.0,  # probes go through another library
        "retry.budget_ratio": 10,
    }
    async with Gateway(load_config(Path("/dev/null"), {}, settings), seed=1, key_seed=b"test") as gateway:
        await until(lambda: sum(worker.routable for worker in gateway.status().workers) == len(fleet.workers))
        yield gateway


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def payloads(count: int, *, streams: bool) -> Iterator[bytes]:
    for number in range(count):
        asked = {"model": "mock-model", "prompt": [number + 1] * 64, "max_tokens": 4, "stream": streams}
        body = msgspec.json.encode(asked)
        yield (
            b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\nx-session-id: s%d\r\n"
            b"content-length: %d\r\n\r\n%b" % (number % 50, len(body), body)
        )


async def ask(gateway: Gateway, count: int, *, streams: bool, leaves: bool) -> None:
    pool = UpstreamPool()
    shared = payloads(count, streams=streams)
    askers = [_Asker(pool, Origin(*host_and_port(gateway.url)), shared, leaves) for _ in range(CONNECTIONS)]
    for asker in askers:
        asker.next()
    for asker in askers:
        await asker.done.wait()
    pool.close()
    await until(lambda: gauges_are_zero(gateway))


@pytest.mark.parametrize(
    ("policy", "streams", "leaves", "faults"),
    [
        ("cache_load", False, False, ()),
        ("cache_load", True, False, ()),
        ("sticky", True, True, ()),
        ("round_robin", False, False, FAILING),
    ],
    ids=["whole", "streamed", "left", "failing"],
)
def test_a_request_leaves_less_than_one_object_to_the_collector(
    fleet: MockFleet, policy: str, streams: bool, leaves: bool, faults: tuple[dict[str, object], ...]
) -> None:
    uvloop = pytest.importorskip("uvloop")  # as in `kvrelay serve`; asyncio's own transports are cycles themselves
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(switch_faults(fleet, faults))
        garbage = runner.run(_garbage_of_requests(fleet, policy, streams=streams, leaves=leaves))
        runner.run(switch_faults(fleet, ()))
    assert garbage.total() < REQUESTS, garbage.most_common(20)


async def _garbage_of_requests(fleet: MockFleet, policy: str, *, streams: bool, leaves: bool) -> Counter[str]:
    async with serving(fleet, policy) as gateway:
        await ask(gateway, WARM_UP, streams=streams, leaves=leaves)
        with no_collector():
            await ask(gateway, REQUESTS, streams=streams, leaves=leaves)
            return found_garbage()
