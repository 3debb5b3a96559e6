"""The series of a worker's own cache, on the gateway's page."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.mocks import gateway_over
from tests.edge.gateway.scripted import client_of

BLOCKS, BLOCK_TOKENS = 64, 16
SPEC = MockSpec(name="a", blocks=BLOCKS, block_size_tokens=BLOCK_TOKENS, prefill_tokens_per_s=1e6, decode_ms=20.0)


async def page(session: aiohttp.ClientSession, gateway: Gateway) -> dict[str, float]:
    async with session.get(f"{gateway.admin_url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def series_with(session: aiohttp.ClientSession, gateway: Gateway, name: str, at_least: float) -> dict[str, float]:
    """The page, as soon as this series has come so far."""
    async with asyncio.timeout(5):
        while True:
            found = await page(session, gateway)
            if found.get(name, 0.0) >= at_least:
                return found
            await asyncio.sleep(0.05)


@pytest.mark.covers("TR-03")
async def test_usage_eviction_local_hits_and_what_running_requests_hold() -> None:
    """Prompts of 30 blocks in a pool of 64: the third has to evict. The first comes twice in a row and hits."""
    async with MockFleet([SPEC]) as fleet, gateway_over(*fleet.workers) as gateway, client_of(gateway) as client:

        def body(first: int, **members: Any) -> dict[str, Any]:
            tokens = list(range(first, first + 30 * BLOCK_TOKENS))
            return {"model": "mock-model", "prompt": tokens, "max_tokens": 1, **members}

        for first in (1000, 1000, 2000, 3000):
            assert (await client.post(body(first)))[0] == 200
        async with aiohttp.ClientSession() as session:
            found = await series_with(session, gateway, 'kvrelay_events_total{kind="removed",worker="a"}', 1)
            hits = 'kvrelay_reported_cached_tokens{tier="gpu",worker="a"}'
            assert (await series_with(session, gateway, hits, 1))[hits] == 29 * BLOCK_TOKENS
            assert found['kvrelay_actual_cached_tokens_total{tier="engine",worker="a"}'] == 29 * BLOCK_TOKENS
            running = asyncio.create_task(client.post(body(4000, max_tokens=60, stream=True)))
            held = await series_with(session, gateway, 'kvrelay_active_decode_blocks{worker="a"}', 30)
            used = await series_with(session, gateway, 'kvrelay_reported_kv_usage_ratio{worker="a"}', 29 / BLOCKS)
            assert held['kvrelay_active_decode_blocks{worker="a"}'] <= 34
            assert 0 < used['kvrelay_reported_kv_usage_ratio{worker="a"}'] <= 1
            await running
