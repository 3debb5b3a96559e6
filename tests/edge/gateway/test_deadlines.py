"""A deadline through HTTP: the header, what it does to the route, and what its client is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.mocks import gateway_over
from tests.edge.gateway.scripted import until

HEADER = "x-kvrelay-deadline-ms"
PREFILL_TOKENS_PER_S = 4_000.0
PROMPT = list(range(4_000))  # a second of prefill


@asynccontextmanager
async def _gateway() -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    specs = [MockSpec(name=name, prefill_tokens_per_s=PREFILL_TOKENS_PER_S, decode_ms=2.0) for name in ("m0", "m1")]
    async with (
        MockFleet(specs) as fleet,
        gateway_over(*fleet.workers, gateway__policy="sticky") as gateway,
        aiohttp.ClientSession(base_url=gateway.url) as client,
    ):
        yield gateway, client


async def _ask(
    client: aiohttp.ClientSession, prompt: list[int], deadline: str | None = None
) -> tuple[int, Mapping[str, str], str]:
    body = {"model": "mock-model", "prompt": prompt, "max_tokens": 2, "stream": True}
    headers = {"x-session-id": "s"} | ({} if deadline is None else {HEADER: deadline})
    async with client.post("/v1/completions", json=body, headers=headers) as response:
        return response.status, response.headers, await response.text()


@pytest.mark.covers("RT-19")
async def test_it_is_kept_where_it_can_be_and_refused_at_once_where_it_cannot() -> None:
    async with _gateway() as (gateway, client):
        holder = (await _ask(client, PROMPT))[1]["x-kvrelay-worker"]
        assert (await _ask(client, PROMPT, "150"))[1]["x-kvrelay-worker"] == holder, "it is warm there"

        status, headers, text = await _ask(client, PROMPT[::-1], "150")
        assert (status, headers["x-kvrelay-reason"]) == (503, "deadline_unreachable"), text
        assert 1 <= int(headers["retry-after"]) <= 5
        refused = gateway.receipts.recent(1)[0]
        assert set(refused.over_deadline_ms) == {"m0", "m1"} and min(refused.over_deadline_ms.values()) > 150

        long = asyncio.create_task(_ask(client, [*PROMPT, *range(6_000)]))
        await until(lambda: any(worker.targets[0].active_prefill_tokens > 5_000 for worker in gateway.status().workers))
        _, headers, _ = await _ask(client, PROMPT, "1250")
        assert headers["x-kvrelay-worker"] != holder, "a second and a half of prefill is before it there"
        moved = gateway.receipts.recent(1)[0]
        assert (moved.fallback_reason, set(moved.over_deadline_ms)) == ("deadline", {holder})
        assert (await long)[0] == 200
        page = gateway.metrics.render().decode()
    assert 'kvrelay_deadlines_total{outcome="refused"} 1.0' in page
    kept = sum(receipt.ttft_ms <= receipt.deadline_ms for receipt in gateway.receipts.recent(9) if _is_timed(receipt))
    assert f'kvrelay_deadlines_total{{outcome="kept"}} {kept:.1f}' in page and kept >= 1


def _is_timed(receipt) -> bool:
    return receipt.deadline_ms is not None and receipt.ttft_ms is not None


@pytest.mark.parametrize("value", ["soon", "0", "-5", "1e3", "", "1" * 12, "1500 ms"])
async def test_one_that_cannot_be_read_is_named_and_nothing_is_asked(value: str) -> None:
    async with _gateway() as (gateway, client):
        status, _, text = await _ask(client, PROMPT[:20], value)
        assert status == 400 and HEADER in text and f"`{value}`" in text and "1500" in text
        assert gateway.receipts.recent(5) == []
        assert (await _ask(client, PROMPT[:20], " 1500.5 "))[0] == 200
        assert gateway.receipts.recent(1)[0].deadline_ms == pytest.approx(1_500, abs=50)


async def test_it_is_for_the_gateway_alone() -> None:
    async with _gateway() as (_, client):
        async with client.get("/v1/models", headers={HEADER: "nonsense"}) as response:
            assert response.status == 400
        async with client.get("/health", headers={HEADER: "nonsense"}) as response:
            assert response.status == 200
