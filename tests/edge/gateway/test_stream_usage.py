"""Usage of streams that did not ask for it, through the real gateway: in the receipt, and nowhere else."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrelay.core.model.units import Status
from kvrelay.edge.http.server import Exchange
from tests.edge.gateway.scripted import (
    EVENT_STREAM,
    JSON,
    USAGE,
    ScriptedWorker,
    chunk,
    client_of,
    gauges_are_zero,
    receipts,
    running,
    stream,
    token_body,
    until,
)

pytestmark = pytest.mark.covers("S30")

DONE = b"data: [DONE]\n\n"
TOKENS = chunk("one") + chunk("two")
COUNTS = b"data: " + msgspec.json.encode({"choices": [], "usage": USAGE}) + b"\n\n"


def asked(exchange: Exchange) -> bool:
    options = msgspec.json.decode(exchange.body).get("stream_options") or {}
    return bool(options.get("include_usage"))


def honest(exchange: Exchange) -> None:
    """Counts only for who asks."""
    exchange.start(200, (EVENT_STREAM,))
    exchange.write(TOKENS + (COUNTS if asked(exchange) else b"") + DONE)
    exchange.finish()


def in_small_pieces(exchange: Exchange) -> None:
    exchange.start(200, (EVENT_STREAM,))
    whole = TOKENS + (COUNTS if asked(exchange) else b"") + DONE
    pieces = [whole[start : start + 7] for start in range(0, len(whole), 7)]

    def send_next() -> None:
        exchange.write(pieces.pop(0))
        if pieces:
            asyncio.get_running_loop().call_later(0.001, send_next)
        else:
            exchange.finish()

    send_next()


def ignorant(exchange: Exchange) -> None:
    """Knows no stream_options and says so."""
    if b"stream_options" in exchange.body:
        exchange.respond(400, (JSON,), b'{"error":"Unrecognized request argument supplied: stream_options"}')
    else:
        honest(exchange)


def compressing(exchange: Exchange) -> None:
    body = gzip.compress(TOKENS + (COUNTS if asked(exchange) else b"") + DONE, mtime=0)
    exchange.start(200, (EVENT_STREAM, (b"content-encoding", b"gzip")))
    exchange.write(body)
    exchange.finish()


def measuring(exchange: Exchange) -> None:
    exchange.respond(200, (EVENT_STREAM,), TOKENS + (COUNTS if asked(exchange) else b"") + DONE)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream_options": None},
    {"stream_options": {"include_usage": False}},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("script", [honest, in_small_pieces])
async def test_what_was_not_asked_for_is_not_seen_but_noted(
    script: Callable[[Exchange], None], options: dict[str, Any]
) -> None:
    worker = ScriptedWorker("a", script)
    async with running(worker) as gateway, client_of(gateway) as client:
        status, body, _ = await client.post(token_body(stream=True, **options))
        assert (status, body) == (200, TOKENS + DONE)
        (receipt,) = receipts(gateway)
        assert (receipt.actual_cached_tokens, receipt.status) == (16, Status.OK)
        assert receipt.ttft_ms is not None
        assert len(worker.requests) == 1


async def test_what_was_asked_for_is_seen() -> None:
    worker = ScriptedWorker("a", honest)
    async with running(worker) as gateway, client_of(gateway) as client:
        body = token_body(stream=True, stream_options={"include_usage": True})
        assert (await client.post(body))[1] == TOKENS + COUNTS + DONE
        assert msgspec.json.decode(worker.requests[0].body) == body
        assert receipts(gateway)[0].actual_cached_tokens == 16


@pytest.mark.parametrize("script", [ignorant, compressing, measuring])
async def test_a_worker_that_cannot_be_asked_unseen_is_asked_as_before_from_then_on(
    script: Callable[[Exchange], None],
) -> None:
    worker = ScriptedWorker("a", script)
    async with running(worker) as gateway, client_of(gateway) as client:
        for _ in range(3):
            status, body, _ = await client.post(token_body(stream=True))
            assert (status, body) == (200, TOKENS + DONE)
        assert [asked(exchange) for exchange in worker.requests] == [True, False, False, False]
        assert [len(receipt.attempts) for receipt in receipts(gateway)] == [1, 1, 1]
        assert all(receipt.actual_cached_tokens is None for receipt in receipts(gateway))
        await until(lambda: gauges_are_zero(gateway))


async def test_a_refusal_that_repeats_the_body_shows_the_body_that_was_sent_and_teaches_nothing() -> None:
    def echo(exchange: Exchange) -> None:
        exchange.respond(422, (JSON,), b'{"detail":%b}' % exchange.body)

    worker = ScriptedWorker("a", echo)
    async with running(worker) as gateway, client_of(gateway) as client:
        sent = msgspec.json.encode(token_body(stream=True))
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + "/v1/completions", data=sent) as response,
        ):
            assert (response.status, await response.read()) == (422, b'{"detail":%b}' % sent)
        worker.script = honest
        assert (await client.post(token_body(stream=True)))[1] == TOKENS + DONE
        assert receipts(gateway)[0].actual_cached_tokens == 16


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_refusal_that_is_not_about_the_question_passes_and_is_asked_for_once(status: int) -> None:
    refusal = b'{"error":"yours"}' + b" " * (3 * 1024 * 1024 if status == 413 else 0)
    worker = ScriptedWorker("a", lambda exchange: exchange.respond(status, (JSON,), refusal))
    async with running(worker) as gateway, client_of(gateway) as client:
        got, body, headers = await client.post(token_body(stream=True))
        assert (got, body, headers["content-length"]) == (status, refusal, str(len(refusal)))
        assert len(worker.requests) == 1
        assert receipts(gateway)[0].status is Status.CLIENT_ERROR


async def test_an_answer_that_is_no_stream_passes() -> None:
    whole = msgspec.json.encode({"choices": [], "usage": USAGE})
    worker = ScriptedWorker("a", lambda exchange: exchange.respond(200, (JSON,), whole))
    async with running(worker) as gateway, client_of(gateway) as client:
        _, body, headers = await client.post(token_body(stream=True))
        assert (body, headers["content-length"]) == (whole, str(len(whole)))
        assert receipts(gateway)[0].actual_cached_tokens == 16


async def test_a_body_with_a_digest_and_a_worker_of_another_kind_get_what_was_sent() -> None:
    worker = ScriptedWorker("a", honest)
    async with running(worker) as gateway, client_of(gateway) as client:
        assert (await client.post(token_body(stream=True), content_digest="sha-256=:x:"))[1] == TOKENS + DONE
        assert not asked(worker.requests[0])
    other = ScriptedWorker("b", honest)
    await other.start()
    workers = [{"name": "b", "url": other.url, "adapter": "openai"}]
    async with running(other, workers=workers) as gateway, client_of(gateway) as client:
        assert (await client.post(token_body(stream=True)))[1] == TOKENS + DONE
        assert not asked(other.requests[0])


async def test_a_worker_that_dies_behind_held_bytes_is_replaced_unseen() -> None:
    def half_an_event(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        exchange.write(TOKENS[:20])
        asyncio.get_running_loop().call_later(0.02, exchange.abort)

    workers = ScriptedWorker("a", half_an_event), ScriptedWorker("b", stream)
    async with running(*workers, gateway__policy="round_robin") as gateway, client_of(gateway) as client:
        status, body, headers = await client.post(token_body(stream=True))
        assert (status, body, headers["x-kvrelay-worker"]) == (200, TOKENS + DONE, "b")
