"""One mock worker for all clients, and a gateway of its own for every test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.system.config import load_config
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.scripted import gauges_are_zero, until

SPEC = MockSpec(
    name="m0",
    adapters=("ad-x",),
    prefill_tokens_per_s=1e6,
    decode_ms=0.5,
    step_overhead_ms=0.0,
    reply_tokens=12,
)


@pytest.fixture(scope="package")
def worker() -> Iterator[RunningWorker]:
    with MockFleet([SPEC]) as fleet:
        yield fleet.workers[0]


@pytest_asyncio.fixture
async def gateway(worker: RunningWorker) -> AsyncIterator[Gateway]:
    settings = {
        "workers": [{"name": "m0", "url": worker.url}],
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "health.interval_s": 0.1,
    }
    async with Gateway(load_config(Path("/dev/null"), {}, settings), seed=1, key_seed=b"test") as gateway:
        await until(lambda: any(worker.routable for worker in gateway.status().workers))
        yield gateway
        await until(lambda: gauges_are_zero(gateway))
    async with aiohttp.ClientSession(worker.url) as session:
        await session.delete("/mock/faults")
