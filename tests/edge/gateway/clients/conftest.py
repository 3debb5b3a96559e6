"""One mock worker for all clients, and a gateway of its own for every test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.mocks import gateway_over, heal

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
    async with gateway_over(worker) as gateway:
        yield gateway
    await heal(worker.url)
