"""Events that get lost without a trace, and what the gateway makes of it: with real mock worker processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvrelay.core.model.units import IndexState, RouteReason
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.scripted import Client, client_of, receipts, running, token_body, until


@asynccontextmanager
async def in_front_of(*workers: RunningWorker, **members: str) -> AsyncIterator[Gateway]:
    configured = [{"name": worker.spec.name, "url": worker.url, **members} for worker in workers]
    async with running(workers=configured) as gateway:
        await until(lambda: len(gateway.status().workers) == len(workers), within_s=20)
        yield gateway


async def withhold_next_batch(worker: RunningWorker) -> None:
    fault = {"kind": "drop_event", "count": 1}
    async with aiohttp.ClientSession() as session, session.post(f"{worker.url}/mock/faults", json=fault) as response:
        assert response.status < 300, await response.text()


def gpu_blocks(gateway: Gateway) -> int:
    return gateway.status().workers[0].targets[0].index_blocks["gpu"]


async def lose_a_batch(gateway: Gateway, client: Client, worker: RunningWorker) -> dict[str, object]:
    """Answers a request whose stored event got lost. A subscription that is still new fetches what it missed."""
    for attempt in range(20):
        before = gpu_blocks(gateway)
        await withhold_next_batch(worker)
        body = {**token_body(), "prompt": list(range(5_000 + attempt * 200, 5_200 + attempt * 200))}
        await client.post(body)
        try:
            await until(lambda before=before: gpu_blocks(gateway) > before, within_s=0.5)
        except TimeoutError:
            return body
    raise AssertionError("no batch was lost")


@pytest.mark.covers("DR-07", "RC-12")
async def test_a_lost_tail_event_is_noticed_by_its_hits_and_repaired_within_seconds_of_traffic() -> None:
    async with MockFleet([MockSpec(name="a", model="m")]) as mocks, in_front_of(mocks.workers[0]) as gateway:
        (worker,) = mocks.workers
        async with client_of(gateway) as client:
            await client.post(token_body(400))
            await until(lambda: gpu_blocks(gateway) == 25)
            body = await lose_a_batch(gateway, client, worker)
            known_blocks = gpu_blocks(gateway)
            began = time.monotonic()
            while True:
                await client.post(body)
                newest = receipts(gateway)[0]
                if newest.matched_tokens_at_route:
                    break
                assert time.monotonic() - began < 60, newest
                await asyncio.sleep(0.3)
            assert newest.matched_tokens_at_route == newest.actual_cached_tokens == 192
            target = gateway.status().workers[0].targets[0]
            assert target.index_blocks["gpu"] == known_blocks + 12, "nothing was forgotten for it"
            assert (target.drift.under_claim, target.drift.over_claim, target.drift.resyncs) == (3, 0, 1)
            during = [receipt for receipt in receipts(gateway) if receipt.index_state is IndexState.INCOMPLETE]
            assert newest in during, "doubted until a window of requests agreed"
            _, page = await client.admin("GET", "/metrics")
            assert 'kvrelay_index_resyncs_total{worker="a"} 1.0' in page
            assert 'kvrelay_drifted_requests_total{kind="under_claim",worker="a"} 3.0' in page
            assert 'kvrelay_event_gaps_total{worker="a"}' not in page
            _, shown = await client.admin("GET", "/admin/workers/a")
            assert shown["router"]["targets"][0]["drift"]["resyncs"] == 1


@pytest.mark.covers("MK-03", "S23")
async def test_a_fleet_of_which_nothing_can_match_says_so_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    spec = MockSpec(name="a", model="m", prefill_tokens_per_s=1e6)
    async with (
        MockFleet([spec]) as mocks,
        in_front_of(mocks.workers[0], topic="elsewhere@", replay="none") as gateway,
        client_of(gateway) as client,
    ):
        caplog.set_level(logging.WARNING)
        for part in range(100):  # what was computed before the first look at its counters does not count
            await client.post({**token_body(), "prompt": list(range(part * 2_000, part * 2_000 + 1_500))})
            await asyncio.sleep(0.05)
            if gateway.status().index_problem is not None:
                break
        problem = gateway.status().index_problem
        assert problem is not None and problem.startswith("nothing can match: a: it computed ")
        assert "index_unusable worker=a" in caplog.text and "index_unusable worker=-" in caplog.text
        await client.post(token_body())
        newest = receipts(gateway)[0]
        assert newest.index_state is IndexState.UNUSABLE
        assert newest.route_reason is RouteReason.ONLY_CANDIDATE
        _, page = await client.admin("GET", "/metrics")
        assert 'kvrelay_index_usable{worker="a"} 0.0' in page
        refused, why = await client.admin("PUT", "/admin/policy", {"policy": "cache_load"})
        assert refused == 409 and "`cache_load` needs an index" in why["error"]["message"]
        allowed, _ = await client.admin("PUT", "/admin/policy", {"policy": "least_load"})
        assert allowed == 200 and gateway.status().index_problem is None
