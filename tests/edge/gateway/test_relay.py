"""One request through the real gateway and router to scripted workers: what passes, what is retried, what breaks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import aiohttp
import msgspec
import pytest

from kvrelay.core.model.units import Fault, Status
from kvrelay.edge.http.server import Exchange
from tests.edge.gateway.scripted import (
    ANSWER,
    EVENT_STREAM,
    JSON,
    USAGE,
    ScriptedWorker,
    answer,
    chunk,
    client_of,
    gauges_are_zero,
    hang,
    receipts,
    running,
    stream,
    token_body,
    until,
)
from tests.edge.http.raw import connect


@pytest.mark.covers("RC-01", "RC-02", "RC-09", "RC-11")
async def test_an_answer_passes_unchanged_and_leaves_one_receipt() -> None:
    worker = ScriptedWorker("a")
    async with running(worker) as gateway, client_of(gateway) as client:
        status, body, headers = await client.post(token_body(), x_session_id="s-1", x_request_id="req-1")
        assert (status, body) == (200, ANSWER)
        assert headers["x-kvrelay-request-id"] == "req-1"
        assert headers["x-kvrelay-worker"] == "a"
        assert headers["x-kvrelay-route-reason"] == "only_candidate"
        assert headers["x-kvrelay-matched-tokens"] == "0"
        (receipt,) = receipts(gateway)
        assert (receipt.request_id, receipt.session_id, receipt.status) == ("req-1", "s-1", Status.OK)
        assert (receipt.actual_cached_tokens, receipt.actual_local_hits) == (16, 1)
        assert receipt.decision_us is not None and receipt.ttft_ms is None
        await until(lambda: gauges_are_zero(gateway))


async def test_an_error_does_not_say_what_its_worker_holds() -> None:
    """Whoever has no key for the worker would learn from it which prompts others have sent."""
    worker = ScriptedWorker("a")
    async with running(worker) as gateway, client_of(gateway) as client:
        await client.post(token_body(64))
        _, _, headers = await client.post(token_body(64))
        assert headers["x-kvrelay-matched-tokens"] == "48"
        for status in (401, 404, 429, 500):
            worker.script = lambda exchange, status=status: exchange.respond(status, (), b"no")
            answered, _, headers = await client.post(token_body(64))
            assert answered == status and "x-kvrelay-worker" in headers
            assert "x-kvrelay-matched-tokens" not in headers
            assert receipts(gateway)[0].matched_tokens_at_route == 48


async def test_the_request_reaches_the_worker_as_it_was_sent() -> None:
    worker = ScriptedWorker("a")
    raw = b'{ "model":"m" , "prompt":[1,2,3],"x":1.50, "u":"\\u00e9" }'
    async with running(worker) as gateway, aiohttp.ClientSession() as session:
        headers = {"X-Custom": "Kept", "Connection": "keep-alive, X-Hop", "X-Hop": "1", "Authorization": "Bearer k"}
        async with session.post(gateway.url + "/v1/completions?q=1", data=raw, headers=headers) as response:
            await response.read()
        (seen,) = worker.requests
        assert (seen.body, seen.target) == (raw, "/v1/completions?q=1")
        assert seen.header(b"x-custom") == b"Kept" and seen.header(b"authorization") == b"Bearer k"
        assert seen.header(b"x-hop") is None and seen.header(b"connection") is None
        assert seen.header(b"host") == worker.url.removeprefix("http://").encode()
        assert seen.header(b"x-request-id") is not None


async def test_an_id_that_we_cannot_use_reaches_the_worker_as_the_only_one() -> None:
    worker = ScriptedWorker("a")
    async with running(worker) as gateway, client_of(gateway) as client:
        _, _, headers = await client.post(token_body(), x_request_id="has blanks, and is odd")
        (seen,) = worker.requests
        ids = [value for name, value in seen.headers if name.lower() == b"x-request-id"]
        assert ids == [b"has blanks, and is odd"]
        assert headers["x-kvrelay-request-id"].startswith("kvr-")


async def test_hop_by_hop_headers_of_the_worker_end_here() -> None:
    def script(exchange: Exchange) -> None:
        exchange.respond(200, (JSON, (b"keep-alive", b"timeout=5"), (b"x-kept", b"1"), (b"te", b"x")), ANSWER)

    async with running(ScriptedWorker("a", script)) as gateway, client_of(gateway) as client:
        _, _, headers = await client.post(token_body())
        assert headers["x-kept"] == "1" and "keep-alive" not in headers and "te" not in headers


async def test_a_stream_passes_chunk_by_chunk_and_its_times_and_counts_are_noted() -> None:
    async with running(ScriptedWorker("a", stream)) as gateway, client_of(gateway) as client:
        status, body, headers = await client.post(token_body(stream=True))
        assert status == 200 and headers["content-type"] == "text/event-stream"
        assert body.startswith(chunk("one") + chunk("two")) and body.endswith(b"data: [DONE]\n\n")
        (receipt,) = receipts(gateway)
        assert receipt.ttft_ms is not None and receipt.actual_cached_tokens == 16


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_workers_refusal_of_the_request_passes_and_is_not_retried(status: int) -> None:
    workers = [ScriptedWorker(name, lambda e: e.respond(status, (JSON,), b'{"error":"yours"}')) for name in "ab"]
    async with running(*workers) as gateway, client_of(gateway) as client:
        assert (await client.post(token_body()))[:2] == (status, b'{"error":"yours"}')
        assert sum(len(worker.requests) for worker in workers) == 1
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.http_status) == (Status.CLIENT_ERROR, status)


@pytest.mark.parametrize("status", [429, 503])
async def test_back_pressure_is_tried_elsewhere_and_passes_in_the_end(status: int) -> None:
    def busy(exchange: Exchange) -> None:
        exchange.respond(status, (JSON, (b"retry-after", b"7")), b'{"error":"busy"}')

    workers = [ScriptedWorker("a", busy), ScriptedWorker("b", busy)]
    async with running(*workers) as gateway, client_of(gateway) as client:
        got, body, headers = await client.post(token_body())
        assert (got, body, headers["retry-after"]) == (status, b'{"error":"busy"}', "7")
        assert [len(worker.requests) for worker in workers] == [1, 1]
        workers[1].script = answer
        assert (await client.post(token_body()))[0] == 200
        assert all(worker.up for worker in gateway.status().workers)


def _dies_before_head(exchange: Exchange) -> None:
    exchange.abort()


def _dies_after_head(exchange: Exchange) -> None:
    exchange.start(200, (EVENT_STREAM,))
    asyncio.get_running_loop().call_later(0.02, exchange.abort)


@pytest.mark.covers("S27")
@pytest.mark.parametrize("death", [_dies_before_head, _dies_after_head])
async def test_a_worker_that_dies_before_its_first_body_byte_is_replaced_unseen(
    death: Callable[[Exchange], None],
) -> None:
    first, second = ScriptedWorker("a", death), ScriptedWorker("b", stream)
    async with running(first, second, gateway__policy="round_robin") as gateway, client_of(gateway) as client:
        status, body, headers = await client.post(token_body(stream=True))
        assert status == 200 and body.count(chunk("one")) == 1 and headers["x-kvrelay-worker"] == "b"
        (receipt,) = receipts(gateway)
        assert [attempt.worker for attempt in receipt.attempts] == ["a", "b"]
        assert (receipt.attempts[0].fault, receipt.attempts[1].fault) == (Fault.RESET, None)
        assert receipt.status is Status.OK
        await until(lambda: gauges_are_zero(gateway))


@pytest.mark.covers("S27", "RC-13")
async def test_a_stream_that_breaks_is_seen_as_broken_and_never_repeated() -> None:
    def five_then_death(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        for number in range(5):
            exchange.write(chunk(f"t{number}"))
        asyncio.get_running_loop().call_later(0.02, exchange.abort)

    first, second = ScriptedWorker("a", five_then_death), ScriptedWorker("b", stream)
    async with running(first, second, gateway__policy="round_robin") as gateway, aiohttp.ClientSession() as session:
        received = b""
        with pytest.raises(aiohttp.ClientPayloadError):
            async with session.post(gateway.url + "/v1/completions", json=token_body(stream=True)) as response:
                async for data in response.content.iter_any():
                    received += data
        assert received == b"".join(chunk(f"t{number}") for number in range(5))
        assert second.requests == []
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (Status.WORKER_LOST, "worker_lost")
        await until(lambda: gauges_are_zero(gateway))


def _head_only(exchange: Exchange) -> None:
    exchange.start(200, (EVENT_STREAM,))


def _head_and_one(exchange: Exchange) -> None:
    exchange.start(200, (EVENT_STREAM,))
    exchange.write(chunk("one"))


def _half_a_body(exchange: Exchange) -> None:
    exchange.start(200, (JSON, (b"content-length", b"%d" % len(ANSWER))))
    exchange.write(ANSWER[:20])


@pytest.mark.covers("S01", "S02")
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("script", [hang, _head_only, _head_and_one, _half_a_body])
async def test_a_client_that_leaves_is_followed_to_the_worker_and_the_books_close(
    script: Callable[[Exchange], None], streams: bool
) -> None:
    workers = [ScriptedWorker("a", script), ScriptedWorker("b", script)]
    async with running(*workers) as gateway:
        _, writer = await connect(int(gateway.url.rpartition(":")[2]))
        body = b'{"model":"m","prompt":[%b],"stream":%b}' % (b",".join([b"7"] * 64), b"true" if streams else b"false")
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await until(lambda: sum(len(worker.requests) for worker in workers) == 1)
        await asyncio.sleep(0.15)  # a health cycle passes; the open request stays booked
        assert sum(target.active_requests for w in gateway.status().workers for target in w.targets) == 1
        writer.close()
        await until(lambda: sum(len(worker.left) for worker in workers) == 1, within_s=1)
        await until(lambda: gauges_are_zero(gateway), within_s=1)
        (receipt,) = receipts(gateway)
        assert receipt.status is Status.CLIENT_CANCELLED
        assert all(worker.up for worker in gateway.status().workers)


@pytest.mark.parametrize("after_chunk", [False, True])
async def test_a_silent_worker_runs_out_of_time(after_chunk: bool) -> None:
    worker = ScriptedWorker("a", _head_and_one if after_chunk else hang)
    flags = {"gateway__timeouts__first_byte_s": 0.2, "gateway__timeouts__idle_s": 0.2}
    async with running(worker, **flags) as gateway, client_of(gateway) as client:
        if after_chunk:
            with pytest.raises(aiohttp.ClientPayloadError):
                await client.post(token_body(stream=True))
        else:
            assert (await client.post(token_body()))[0] == 504
        (receipt,) = receipts(gateway)
        fault = Fault.IDLE_TIMEOUT if after_chunk else Fault.FIRST_BYTE_TIMEOUT
        assert (receipt.status, receipt.attempts[0].fault) == (Status.TIMEOUT, fault)
        await until(lambda: len(worker.left) == 1)
        await until(lambda: gauges_are_zero(gateway))


async def test_the_total_time_ends_a_stream_that_never_falls_silent() -> None:
    def endless(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        tick(exchange)

    def tick(exchange: Exchange) -> None:
        exchange.write(chunk("x"))
        if not exchange.gone:
            asyncio.get_running_loop().call_later(0.05, tick, exchange)

    async with running(ScriptedWorker("a", endless), gateway__timeouts__total_s=0.4) as gateway:
        async with client_of(gateway) as client:
            with pytest.raises(aiohttp.ClientPayloadError):
                await client.post(token_body(stream=True))
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.attempts[0].fault) == (Status.TIMEOUT, Fault.TOTAL_TIMEOUT)
        await until(lambda: gauges_are_zero(gateway))


async def test_a_worker_that_takes_no_connection_in_time_is_replaced_and_named() -> None:
    workers = ScriptedWorker("a"), ScriptedWorker("b")
    flags = {"gateway__policy": "round_robin", "gateway__timeouts__connect_s": 0.3, "health__interval_s": 3600}
    async with running(*workers, **flags) as gateway, client_of(gateway) as client:
        await workers[0].stop()
        with socket.create_server(("127.0.0.1", workers[0].port), backlog=0) as full:
            waiting = [socket.socket() for _ in range(4)]
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(full.getsockname())
            assert [(await client.post(token_body()))[0] for _ in range(2)] == [200, 200]
            for each in waiting:
                each.close()
        faults = [[attempt.fault for attempt in receipt.attempts] for receipt in receipts(gateway)]
        assert [Fault.CONNECT_TIMEOUT, None] in faults
        await until(lambda: gauges_are_zero(gateway))


async def test_garbage_from_a_worker_is_the_workers_fault() -> None:
    async def serve_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"SSH-2.0-nonsense\r\n\r\n")
        await writer.drain()
        writer.close()

    worker = ScriptedWorker("a")
    async with running(worker) as gateway, client_of(gateway) as client:
        await worker.stop()
        garbage = await asyncio.start_server(serve_garbage, "127.0.0.1", worker.port)
        status, _, _ = await client.post(token_body())
        assert status == 502
        assert receipts(gateway)[0].attempts[0].fault in (Fault.GARBAGE, Fault.CONNECT)
        garbage.close()
        await garbage.wait_closed()


async def test_a_slow_reader_slows_the_worker_down_instead_of_filling_memory() -> None:
    flow: list[bool] = []

    def flood(exchange: Exchange) -> None:
        exchange.on_flow = flow.append
        exchange.start(200, (EVENT_STREAM,))
        for _ in range(400):
            exchange.write(b"x" * 65536)
        exchange.finish()

    async with running(ScriptedWorker("a", flood)) as gateway:
        reader, writer = await connect(int(gateway.url.rpartition(":")[2]))
        body = b'{"model":"m","prompt":[1]}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        await asyncio.sleep(0.4)
        assert flow == [False], "the worker could send everything although nobody read"
        assert len(await reader.read()) > 400 * 65536
        writer.close()


async def test_without_a_worker_the_client_is_told_so_and_a_receipt_is_left() -> None:
    async with running() as gateway, client_of(gateway) as client:
        status, body, headers = await client.post(token_body())
        assert status == 503 and b"no_worker" in body and headers["retry-after"] == "1"
        (receipt,) = receipts(gateway)
        assert receipt.status is Status.REFUSED


@pytest.mark.covers("RC-11")
async def test_every_request_leaves_exactly_one_receipt_whatever_becomes_of_it() -> None:
    scripts: list[Callable[[Exchange], None]] = [
        answer,
        stream,
        _dies_before_head,
        lambda e: e.respond(500, (), b"no"),
        lambda e: e.respond(404, (), b"no"),
        lambda e: e.respond(204, (), b""),
    ]
    turn = iter(range(10_000))

    def any_of(exchange: Exchange) -> None:
        scripts[next(turn) % len(scripts)](exchange)

    workers = [ScriptedWorker(name, any_of) for name in "abc"]
    async with running(*workers, health__failures=1000, retry__budget_ratio=10) as gateway:
        async with client_of(gateway) as client:
            answers = await asyncio.gather(*(client.post(token_body()) for _ in range(60)))
        ids = [headers["x-kvrelay-request-id"] for _, _, headers in answers]
        assert sorted(receipt.request_id for receipt in receipts(gateway)) == sorted(ids)
        assert len(set(ids)) == 60
        await until(lambda: gauges_are_zero(gateway))
        gateway.router.check()


async def test_a_repeated_request_id_is_told_apart() -> None:
    async with running(ScriptedWorker("a")) as gateway, client_of(gateway) as client:
        ids = [(await client.post(token_body(), x_request_id="same"))[2]["x-kvrelay-request-id"] for _ in range(3)]
        assert ids[0] == "same" and len(set(ids)) == 3


@pytest.mark.covers("RC-11")
async def test_a_client_that_leaves_with_its_whole_answer_has_cancelled_nothing() -> None:
    """OpenAI's own client closes its connection at `[DONE]`, which comes before the end of the body."""
    asked: list[Exchange] = []

    def all_but_the_end(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        exchange.write(chunk("one") + b'data: {"choices":[],"usage":%b}\n\n' % msgspec.json.encode(USAGE))
        exchange.write(b"data: [DONE]\n\n")
        asked.append(exchange)

    worker = ScriptedWorker("a", all_but_the_end)
    async with running(worker) as gateway:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{gateway.url}/v1/completions", json=token_body(stream=True)) as response,
        ):
            while b"[DONE]" not in await response.content.readline():
                pass
            response.close()
        await until(lambda: gateway.describe()["client_connections"] == 0)
        assert not worker.left and not receipts(gateway)
        asked[0].finish()
        await until(lambda: receipts(gateway))
        (receipt,) = receipts(gateway)
        assert receipt.status is Status.OK and receipt.actual_cached_tokens == 16
        await until(lambda: gauges_are_zero(gateway))
