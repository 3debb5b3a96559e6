"""A real gateway over real mock workers, for tests of what clients notice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.system.config import load_config
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.direct import ask, post
from tests.edge.gateway.scripted import gauges_are_zero, until


@asynccontextmanager
async def gateway_over(*workers: RunningWorker, **flags: object) -> AsyncIterator[Gateway]:
    """With every worker routable, and nothing left booked at its end. `flags`: keys with `__` for dots."""
    settings: dict[str, object] = {
        "workers": [{"name": worker.name, "url": worker.url} for worker in workers],
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "health.interval_s": 0.1,
    }
    settings.update({name.replace("__", "."): value for name, value in flags.items()})
    async with Gateway(load_config(Path("/dev/null"), {}, settings), seed=1, key_seed=b"test") as gateway:
        await until(lambda: sum(worker.routable for worker in gateway.status().workers) == len(workers))
        yield gateway
        await until(lambda: gauges_are_zero(gateway))
        gateway.router.check()


@asynccontextmanager
async def fleet_of(count: int, *, decode_ms: float = 0.5, **flags: object) -> AsyncIterator[tuple[MockFleet, Gateway]]:
    specs = [MockSpec(name=f"m{number}", prefill_tokens_per_s=1e6, decode_ms=decode_ms) for number in range(count)]
    async with MockFleet(specs) as fleet, gateway_over(*fleet.workers, **flags) as gateway:
        yield fleet, gateway


async def fault(url: str, **members: object) -> None:
    assert (await ask(url, post("/mock/faults", members))).status == 200


async def heal(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        await session.delete("/mock/faults")
