"""Answers that are long, early, or have something behind or before them: all of it reaches the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrelay.core.model.units import Fault, Status
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.http.server import Exchange
from tests.edge.gateway.direct import ask, get, post
from tests.edge.gateway.scripted import (
    ANSWER,
    JSON,
    ScriptedWorker,
    answer,
    gauges_are_zero,
    receipts,
    running,
    until,
)
from tests.edge.http.raw import connect

LONG = b'{"error":"' + b"x" * 3_000_000 + b'"}'
REQUEST = post("/v1/completions", {"model": "m", "prompt": [1, 2, 3]})


@pytest.mark.covers("S28")
@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize(
    ("status", "fault"), [(500, Fault.SERVER_ERROR), (503, Fault.BACK_PRESSURE), (429, Fault.BACK_PRESSURE)]
)
async def test_an_error_longer_than_is_held_passes_whole_and_is_final(status: int, fault: Fault, framed: bool) -> None:
    def fail(exchange: Exchange) -> None:
        if framed:
            exchange.respond(status, (JSON,), LONG)
            return
        exchange.start(status, (JSON,))
        for start in range(0, len(LONG), 100_000):
            exchange.write(LONG[start : start + 100_000])
        exchange.finish()

    workers = ScriptedWorker("a", fail), ScriptedWorker("b", answer)
    async with running(*workers, gateway__policy="round_robin") as gateway:
        answers = [await ask(gateway.url, REQUEST) for _ in range(2)]
        assert sorted(each.status for each in answers) == [200, status]
        (failed,) = [each for each in answers if each.status == status]
        assert failed.body == LONG and failed.framed_by_length is framed
        (receipt,) = [each for each in receipts(gateway) if each.http_status == status]
        assert [attempt.fault for attempt in receipt.attempts] == [fault]
        assert receipt.status is not Status.OK and receipt.failure_reason == fault.value
        await until(lambda: gauges_are_zero(gateway))


async def test_a_worker_that_dies_in_such_an_answer_leaves_it_broken() -> None:
    def die(exchange: Exchange) -> None:
        exchange.start(500, (JSON, (b"content-length", b"%d" % len(LONG))))
        exchange.write(LONG[:2_000_000])
        asyncio.get_running_loop().call_later(0.05, exchange.abort)

    async with running(ScriptedWorker("a", die)) as gateway:
        reader, writer = await connect(int(gateway.url.rpartition(":")[2]))
        writer.write(REQUEST.replace(b"HOST", b"x", 1))
        async with asyncio.timeout(10):
            received = await reader.read()
        assert received.startswith(b"HTTP/1.1 500") and 1_900_000 < len(received) < len(LONG)
        writer.close()
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (Status.WORKER_LOST, "worker_lost")
        await until(lambda: gauges_are_zero(gateway))


@asynccontextmanager
async def before_raw(said: bytes) -> AsyncIterator[tuple[Gateway, list[bytes]]]:
    """A gateway before a worker that answers every request with these bytes."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(said)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    worker = ScriptedWorker("a")
    async with running(worker, health__interval_s=3600) as gateway:
        await worker.stop()
        server = await asyncio.start_server(serve, "127.0.0.1", worker.port)
        yield gateway, heads
        server.close()
        await server.wait_closed()


async def exchanged(gateway: Gateway, *requests: bytes) -> bytes:
    reader, writer = await connect(int(gateway.url.rpartition(":")[2]))
    writer.write(b"".join(requests))
    async with asyncio.timeout(10):
        received = await reader.read()
    writer.close()
    return received


CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\nconnection: x-hop\r\nx-hop: 1\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
    b"2\r\nab\r\n1\r\nc\r\n0\r\nx-sum: 7\r\nset-cookie: no\r\n\r\n"
)
ASKED = b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /v1/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def test_interim_answers_and_trailers_pass_also_to_pipelined_requests() -> None:
    async with before_raw(CHUNKED) as (gateway, _):
        received = await exchanged(gateway, ASKED, ASKED, LAST)
        assert received.count(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n") == 3
        assert received.count(b"HTTP/1.1 200 OK\r\n") == 3 and b"100 Continue" not in received
        assert received.count(b"3\r\nabc\r\n0\r\nx-sum: 7\r\n\r\n") == 3 and b"set-cookie" not in received
        assert received.count(b"trailer: x-sum\r\n") == 3


async def test_a_client_of_http_1_0_gets_the_body_only() -> None:
    async with before_raw(CHUNKED) as (gateway, _):
        received = await exchanged(gateway, b"GET /v1/x HTTP/1.0\r\n\r\n")
        assert received.startswith(b"HTTP/1.1 200 OK\r\n") and received.endswith(b"\r\n\r\nabc")
        assert b"Early" not in received and b"x-sum: 7" not in received


async def test_head_has_the_head_of_an_answer_and_the_next_request_is_in_step() -> None:
    async with before_raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n") as (gateway, heads):
        received = await exchanged(gateway, ASKED.replace(b"GET", b"HEAD"), LAST.replace(b"GET", b"HEAD"))
        assert received.count(b"HTTP/1.1 200 OK") == 2 and received.count(b"content-length: 5") == 2
        assert sum(head.startswith(b"HEAD ") for head in heads) == 2, "and a probe or two, on a slow machine"


async def test_trailers_of_a_small_request_reach_the_worker() -> None:
    worker = ScriptedWorker("a")
    async with running(worker) as gateway:
        body = b'{"model":"m","prompt":[1]}'
        framed = b"%x\r\n%b\r\n0\r\nX-Sum: 1\r\nHost: evil\r\n\r\n" % (len(body), body)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
        received = await exchanged(gateway, head + b"Trailer: X-Sum\r\n\r\n" + framed)
        assert received.endswith(ANSWER)
        (seen,) = worker.requests
        assert seen.body == body and list(seen.trailers) == [(b"X-Sum", b"1")]
        assert seen.header(b"trailer") == b"X-Sum" and seen.header(b"content-length") is None
        assert receipts(gateway)[0].unscored_because is None


@pytest.mark.parametrize("status", [b"101 Switching Protocols", b"42 Odd"])
async def test_an_answer_that_makes_no_sense_is_the_workers_fault(status: bytes) -> None:
    async with before_raw(b"HTTP/1.1 %b\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n" % status) as (gateway, _):
        assert (await ask(gateway.url, get("/v1/x"))).status == 502
        (receipt,) = receipts(gateway)
        assert (receipt.attempts[-1].fault, receipt.failure_reason) == (Fault.GARBAGE, "worker_lost")
