"""The admission queue through HTTP: a burst larger than the fleet's places is worked off, not refused."""

from __future__ import annotations

import asyncio

import aiohttp

from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.system.config import load_config
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec

BODY = {"model": "mock-model", "prompt": list(range(64)), "max_tokens": 4}
FLAGS = {"gateway.port": 0, "gateway.admin_port": 0, "gateway.policy": "round_robin"}


async def test_a_burst_waits_its_turn_and_leaves_nothing_behind() -> None:
    with MockFleet([MockSpec(name="m0", decode_ms=5.0)]) as fleet:
        workers = [{"url": fleet.workers[0].url, "name": "m0", "max_active_requests": 1}]
        limits = {"gateway.limits.queue_depth": 5, "gateway.limits.queue_wait_s": 20.0}
        async with Gateway(load_config(env={}, flags={**FLAGS, **limits, "workers": workers})) as gateway:
            await _ready(gateway)
            async with aiohttp.ClientSession(base_url=gateway.url) as client:
                answers = await asyncio.gather(*(_ask(client) for _ in range(10)))
            receipts = gateway.receipts.recent(20)
            status = gateway.status()
    assert sorted(answers) == [200] * 6 + [503] * 4, "one place and five to wait in; the rest is told at once"
    waited = [receipt.router_queue_ms for receipt in receipts if receipt.status == "ok"]
    assert len(receipts) == 10 and sum(1 for ms in waited if ms) == 5
    assert (status.queue_depth, status.live_requests) == (0, 0)
    assert {r.failure_reason for r in receipts if r.status == "refused"} <= {"queue_full", "queue_too_slow"}


async def _ready(gateway: Gateway) -> None:
    async with asyncio.timeout(10):
        while True:
            if any(worker.routable for worker in gateway.status().workers):
                return
            await asyncio.sleep(0.02)


async def _ask(client: aiohttp.ClientSession) -> int:
    async with client.post("/v1/completions", json=BODY) as response:
        await response.read()
        assert (response.status == 503) == ("retry-after" in response.headers)
        return response.status
