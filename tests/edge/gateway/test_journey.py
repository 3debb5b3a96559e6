"""The real thing in miniature: `kvrelay serve` as a process in front of mock worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest

from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec

SPECS = [MockSpec(name=name, decode_ms=2.0, prefill_tokens_per_s=20_000.0) for name in ("m0", "m1")]


@pytest.fixture(scope="module")
def fleet() -> Iterator[MockFleet]:
    with MockFleet(SPECS) as fleet:
        yield fleet


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "kvrelay.cli.main", "serve", "--port", "0", "--admin-port", "0", "--json"]
    environment = {**os.environ, "KVRELAY_HEALTH__INTERVAL_S": "0.1"}
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd="/"
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), process
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def admin_of(ready: dict[str, Any]) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url=ready["admin_url"]) as session:
        yield session


async def routable(session: aiohttp.ClientSession, count: int) -> None:
    async with asyncio.timeout(10):
        while True:
            async with session.get("/admin/workers") as response:
                if sum(worker["routable"] for worker in (await response.json())["workers"]) == count:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.covers("MK-01", "RC-09")
async def test_a_chat_and_a_repeated_prompt_through_real_processes(fleet: MockFleet) -> None:
    workers = [argument for worker in fleet.workers for argument in ("--worker", worker.url)]
    with serving(*workers) as (ready, process):
        async with admin_of(ready) as admin, aiohttp.ClientSession(base_url=ready["url"]) as client:
            await routable(admin, 2)
            chat = {"model": "mock-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
            async with client.post("/v1/chat/completions", json=chat) as response:
                assert response.status == 200 and (await response.json())["choices"][0]["message"]["content"]
            prompt = {"model": "mock-model", "prompt": list(range(500, 1000)), "max_tokens": 2}
            for expected in (0, 496):
                async with client.post("/v1/completions", json=prompt) as response:
                    usage = (await response.json())["usage"]
                    assert usage["prompt_tokens_details"]["cached_tokens"] == expected
                await asyncio.sleep(0.2)
            async with admin.get("/admin/receipts?limit=1") as response:
                (receipt,) = (await response.json())["receipts"]
            assert (receipt["actual_cached_tokens"], receipt["matched_tokens_at_route"]) == (496, 496)
            assert receipt["gate_loss_tokens"] == {"prefix": 0, "route": 0, "residency": 0, "transfer": 0}
        process.send_signal(signal.SIGTERM)
        _, talk = process.communicate(timeout=10)
        assert process.returncode == 0 and "draining" in talk


@pytest.mark.covers("MK-05")
async def test_the_fleet_stops_and_comes_back_and_the_gateway_stays() -> None:
    with MockFleet(SPECS) as fleet:
        workers = [argument for worker in fleet.workers for argument in ("--worker", worker.url)]
        with serving(*workers) as (ready, _):
            async with admin_of(ready) as admin, aiohttp.ClientSession(base_url=ready["url"]) as client:
                await routable(admin, 2)
                for name in ("m0", "m1"):
                    fleet.kill(name)
                await routable(admin, 0)
                body = {"model": "mock-model", "prompt": [1, 2, 3], "max_tokens": 1}
                async with client.post("/v1/completions", json=body) as response:
                    assert response.status == 503
                for name in ("m0", "m1"):
                    await asyncio.to_thread(fleet.restart, name)
                await routable(admin, 2)
                async with client.post("/v1/completions", json=body) as response:
                    assert response.status == 200


def test_an_unknown_policy_is_a_usage_error_with_the_nearest_name() -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "serve", "--policy", "cache_lod"]
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=30, cwd="/")
    assert ended.returncode == 2 and ended.stdout == ""
    assert "cache_lod" in ended.stderr and "did you mean `cache_load`?" in ended.stderr


def test_an_open_listener_without_protection_is_refused() -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "serve", "--host", "0.0.0.0", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=30, cwd="/")
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == (
        "error: `gateway.host` is `0.0.0.0`, beyond loopback, without TLS (tls_cert, tls_key) and API keys"
        " (tenants.NAME.api_keys_file)\n"
        "  legal: a loopback address, or protection as named above\n"
        "hint: `insecure = true` under [gateway] allows it without protection\n"
    )
