"""A request whose prompt is still being tokenized is a request like any other: it can be left, cut, and be too late."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from kvrelay.core.model.prompt import TokenIds
from kvrelay.core.model.units import Status
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.gateway.openai import TextPrompt
from tests.edge.gateway.scripted import (
    ScriptedWorker,
    client_of,
    gauges_are_zero,
    hang,
    receipts,
    running,
    token_body,
    until,
)

TEXT = {"model": "m", "prompt": "some text", "max_tokens": 2}


class Stuck:
    """A tokenizer that begins and does not end."""

    revision = 0

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0

    def at_once(self, prompt: TextPrompt) -> TokenIds | None:
        return None

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError("unreachable")

    def describe(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        return


class Broken(Stuck):
    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        raise RuntimeError(f"cannot tokenize {prompt.raw!r}")


def stick(gateway: Gateway, tokenizer: Stuck | None = None) -> Stuck:
    stuck = tokenizer or Stuck()
    gateway.tokens.tokenizer = stuck
    return stuck


@pytest.mark.covers("S01", "S02", "RC-11")
async def test_a_client_that_leaves_meanwhile_is_done_with_at_once() -> None:
    worker = ScriptedWorker("a")
    async with running(worker) as gateway, aiohttp.ClientSession() as session:
        stuck = stick(gateway)
        asking = asyncio.create_task(session.post(f"{gateway.url}/v1/completions", json=TEXT))
        await until(lambda: stuck.begun)
        asking.cancel()
        await until(lambda: receipts(gateway), within_s=1)
        (receipt,) = receipts(gateway)
        assert receipt.status is Status.CLIENT_CANCELLED
        assert worker.requests == []
        await until(lambda: stuck.cancelled and gauges_are_zero(gateway), within_s=1)


@pytest.mark.covers("RC-11")
async def test_the_end_of_the_gateway_leaves_a_receipt_of_it() -> None:
    async with running(ScriptedWorker("a")) as gateway, aiohttp.ClientSession() as session:
        stuck = stick(gateway)
        asking = asyncio.create_task(session.post(f"{gateway.url}/v1/completions", json=TEXT))
        await until(lambda: stuck.begun)
        await gateway.stop()
        answer = await asking
        assert (answer.status, answer.headers["x-kvrelay-reason"]) == (503, "gateway_stopped")
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (Status.ERROR, "gateway_stopped")


@pytest.mark.covers("RC-11")
async def test_its_total_time_can_end_and_that_of_later_requests_still_does() -> None:
    worker = ScriptedWorker("a", hang)
    async with running(worker, gateway__timeouts__total_s=0.3) as gateway, client_of(gateway) as client:
        stick(gateway)
        began = asyncio.get_running_loop().time()
        first, second = await asyncio.gather(client.post(TEXT), client.post(token_body()))
        assert (first[0], second[0]) == (504, 504)
        assert asyncio.get_running_loop().time() - began < 1.5
        assert {receipt.failure_reason for receipt in receipts(gateway)} == {"total_timeout"}
        await until(lambda: gauges_are_zero(gateway))


async def test_a_mistake_in_the_tokenizer_costs_the_match_and_not_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(ScriptedWorker("a")) as gateway, client_of(gateway) as client:
        stick(gateway, Broken())
        assert (await client.post(TEXT))[0] == 200
        assert receipts(gateway)[0].unscored_because == "tokenizer_failed"
        assert "RuntimeError at" in caplog.text and "some text" not in caplog.text
