"""What a shared store did for a request, in the receipts of a gateway over mock workers: the outcome, how far the KV
came, and both predicted times, also when nothing was fetched because computing was quicker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.chaos.tcp import TcpProxy
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.server import StoreServer
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.conformance.stores.places import SharedMemory
from tests.edge.gateway.mocks import gateway_over
from tests.edge.gateway.scripted import client_of, receipts, until

PROMPT_TOKENS = 1128
CHUNKS_TOKENS = 1024
FETCH, RECOMPUTE = "predicted_fetch", "predicted_recompute"


def prompt(number: int) -> str:
    return f"{number:03} " + "what many requests begin with; " * 100


def spec(name: str, url: str, **store: Any) -> MockSpec:
    tiers = {"tiers": [{"url": url}], "deadline_ms": 5000.0, **store}
    return MockSpec(name=name, store=tiers, prefill_tokens_per_s=20_000.0, decode_ms=0.5, events="none", replay="none")


async def keep(worker: str, *numbers: int) -> None:
    """The worker computes these prompts; when this returns, they are in the store."""
    async with aiohttp.ClientSession(worker) as session:
        for number in numbers:
            body = {"model": "mock-model", "prompt": prompt(number)[:PROMPT_TOKENS], "max_tokens": 1}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 200
        wanted = len(numbers) * CHUNKS_TOKENS // 256

        async with asyncio.timeout(10):
            while True:
                async with session.get("/mock/state") as answer:
                    if (await answer.json())["store"]["stored_chunks"] >= wanted:
                        return
                await asyncio.sleep(0.02)


class Asked:
    """One gateway over one worker; each prompt's receipt."""

    def __init__(self, gateway: Gateway, client: Any) -> None:
        self.gateway, self.client = gateway, client

    async def __call__(self, number: int, *, stream: bool = False) -> Receipt:
        body = {"model": "mock-model", "prompt": prompt(number)[:PROMPT_TOKENS], "max_tokens": 4, "stream": stream}
        before = len(receipts(self.gateway))
        status, _, _ = await self.client.post(body)
        assert status == 200
        await until(lambda: len(receipts(self.gateway)) > before)
        return receipts(self.gateway)[0]  # the newest


@asynccontextmanager
async def asking(worker: Any) -> AsyncIterator[Asked]:
    entry = {"name": worker.name, "url": worker.url, "kv_report": worker.url}
    async with gateway_over(worker, workers=[entry]) as gateway, client_of(gateway) as client:
        yield Asked(gateway, client)


@pytest.fixture
def peer() -> Iterator[StoreServer]:
    server = StoreServer(MemoryStore())
    yield server
    server.close()


@pytest.fixture
def shared_memory() -> Iterator[SharedMemory]:
    place = SharedMemory()
    yield place
    place.remove()


@pytest.mark.covers("S36")
async def test_a_remote_made_slow_is_not_used_and_one_made_fast_again_is(peer: StoreServer) -> None:
    async with TcpProxy("127.0.0.1", peer.port) as proxy:
        specs = [
            spec("writer", f"peer://127.0.0.1:{peer.port}"),
            spec("reader", f"peer://127.0.0.1:{proxy.port}", sample_interval_s=0.1),
        ]
        async with MockFleet(specs) as fleet, asking(fleet.workers[1]) as ask:
            await keep(fleet.workers[0].url, *range(1, 21))
            computed = await ask(0)
            assert (computed.remote_outcome, computed.remote_reason) == ("none", "absent")
            assert computed.actual_cached_tokens == 0

            await ask(1)  # the first fetch: only trying tells
            fast = await ask(2)
            assert (fast.remote_outcome, fast.remote_loaded_tokens) == ("hit", CHUNKS_TOKENS)
            assert fast.remote_path_ms[FETCH] < fast.remote_path_ms[RECOMPUTE]

            proxy.do("latency 200ms")
            await ask(3)  # pays for learning it
            slow = await ask(4)
            assert (slow.remote_outcome, slow.remote_reason) == ("none", "slower_than_recompute")
            assert slow.actual_cached_tokens == slow.remote_loaded_tokens == slow.remote_bytes_read == 0
            assert slow.remote_path_ms[FETCH] > slow.remote_path_ms[RECOMPUTE] > 0
            streamed = await ask(5, stream=True)
            assert streamed.remote_reason == "slower_than_recompute"
            assert streamed.remote_path_ms[FETCH] > streamed.remote_path_ms[RECOMPUTE] > 0

            proxy.do("clear")
            used = [receipt for number in range(6, 21) if (receipt := await ask(number)).remote_outcome == "hit"]
            assert used, "it is fast again and never used"
            assert used[-1].remote_path_ms[FETCH] < used[-1].remote_path_ms[RECOMPUTE]


@pytest.mark.covers("TR-20")
async def test_each_hit_says_how_far_it_came(peer: StoreServer, shared_memory: SharedMemory, tmp_path: Path) -> None:
    urls = {
        "cluster": f"peer://127.0.0.1:{peer.port}",
        "persistent": f"file://{tmp_path}",
        "host": shared_memory.url,
    }
    specs = [spec(f"{role}-{scope}", url) for scope, url in urls.items() for role in ("writer", "reader")]
    async with MockFleet(specs) as fleet:
        for scope, writer, reader in zip(urls, fleet.workers[::2], fleet.workers[1::2], strict=True):
            await keep(writer.url, 1)
            async with asking(reader) as ask:
                loaded = await ask(1)
                assert loaded.cached_tokens_by_scope == {scope: CHUNKS_TOKENS, "engine": 0}, scope
                again = await ask(1, stream=True)
                assert again.remote_reason == "already_local"
                assert again.cached_tokens_by_scope == {"engine": again.actual_cached_tokens}
                assert again.actual_cached_tokens is not None and again.actual_cached_tokens > CHUNKS_TOKENS


async def test_an_order_to_leave_the_tier_alone_holds_for_the_next_life_as_well() -> None:
    with MockFleet([spec("w0", "memory://order-holds")]) as fleet:
        async with gateway_over(*fleet.workers) as gateway, client_of(gateway) as client:
            asked = await client.admin("PUT", "/admin/sharing", {"on": False})
            assert asked == (200, {"workers": [{"worker": "w0", "sharing": "off", "why": None}]})
            again = await asyncio.to_thread(fleet.restart, "w0")
            await until(lambda: gateway.status().workers[0].incarnation == again.incarnation)
            assert await client.admin("GET", "/admin/sharing") == asked
            assert (await client.admin("PUT", "/admin/sharing", {"on": True}))[1]["workers"][0]["sharing"] == "on"
            again = await asyncio.to_thread(fleet.restart, "w0")
            await until(lambda: gateway.status().workers[0].incarnation == again.incarnation)
            assert (await client.admin("GET", "/admin/sharing"))[1]["workers"][0]["sharing"] == "on"
