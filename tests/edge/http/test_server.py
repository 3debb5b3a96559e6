"""The server seen from the wire: framing, order, limits, refusals, and how quickly a leaving client is noticed."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvrelay.edge.http.limits import HttpLimits
from kvrelay.edge.http.server import Exchange
from tests.edge.http.raw import connect, send_and_read, serving

GET = b"GET /a?b=1 HTTP/1.1\r\nHost: x\r\n\r\n"
TE = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
CLOSE = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def echo(exchange: Exchange) -> None:
    head = f"{exchange.method} {exchange.path} {exchange.query} ".encode()
    exchange.respond(200, [(b"x-a", b"1")], head + exchange.body)


async def test_whole_response() -> None:
    async with serving(echo) as server:
        assert await send_and_read(server.port, GET) == (
            b"HTTP/1.1 200 OK\r\nx-a: 1\r\ncontent-length: 11\r\n\r\nGET /a b=1 "
        )


async def test_requests_in_any_pieces_give_the_same_answers() -> None:
    chunks = b"3\r\nabc\r\n2;e=1\r\nde\r\n0\r\nT: 1\r\n\r\n"
    request = b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + CLOSE
    async with serving(echo) as server:
        whole = await send_and_read(server.port, request)
        assert b"POST /p  abcde" in whole and whole.endswith(b"GET /last  ")
        assert await send_and_read(server.port, *[request[i : i + 1] for i in range(len(request))]) == whole


async def test_pipelined_requests_are_answered_in_order_when_the_first_is_slow() -> None:
    def slow_first(exchange: Exchange) -> None:
        delay_s = 0.05 if exchange.path == "/0" else 0.0
        asyncio.get_running_loop().call_later(delay_s, exchange.respond, 200, [], exchange.path.encode())

    requests = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(40))
    async with serving(slow_first, HttpLimits(pipelined_requests=4)) as server:
        answers = await send_and_read(server.port, requests)
    bodies = [part.split(b"\r\n\r\n")[1] for part in answers.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == [b"/%d" % i for i in range(40)]


async def test_streamed_response_is_chunked_and_http_1_0_ends_with_the_connection() -> None:
    def stream(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-type", b"text/event-stream")])
        exchange.write(b"one")
        exchange.write(b"")
        exchange.write(b"two" * 10)
        exchange.finish()

    async with serving(stream) as server:
        answer = await send_and_read(server.port, CLOSE)
        assert answer.endswith(b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n1e\r\n" + b"two" * 10 + b"\r\n0\r\n\r\n")
        answer = await send_and_read(server.port, b"GET / HTTP/1.0\r\n\r\n")
        assert answer.endswith(b"connection: close\r\n\r\none" + b"two" * 10)


async def test_head_and_bodyless_statuses_carry_no_body() -> None:
    def bodyless(exchange: Exchange) -> None:
        exchange.respond(204 if exchange.path == "/204" else 200, [], b"" if exchange.path == "/204" else b"x" * 5)

    requests = b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\nGET /204 HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving(bodyless) as server:
        answer = await send_and_read(server.port, requests)
    assert answer == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"


async def test_continue_is_sent_when_the_client_waits_for_it() -> None:
    async with serving(echo) as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 OK")
        writer.close()


async def test_upgrade_is_ignored_and_the_body_is_not_taken_for_a_request() -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    inner = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    post = b"POST /up HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (upgrade, len(inner), inner)
    get = b"GET /get HTTP/1.1\r\nHost: x\r\n%b\r\n" % upgrade
    async with serving(echo) as server:
        whole = await send_and_read(server.port, post + get + CLOSE)
        assert whole.count(b"HTTP/1.1 200 OK") == 3
        assert b"POST /up  " + inner in whole and b"GET /get  " in whole and whole.endswith(b"GET /last  ")
        split = [(post + get + CLOSE)[i : i + 7] for i in range(0, len(post + get + CLOSE), 7)]
        assert await send_and_read(server.port, *split) == whole


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (TE + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n", 400),
        (TE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (TE + b"\r\n0x1\r\na\r\n0\r\n\r\n", 400),
        (TE + b"\r\n1 \r\na\r\n0\r\n\r\n", 400),
        (TE + b"\r\n1;a\nb\r\na\r\n0\r\n\r\n", 400),
        (TE + b"\r\n1\r\nab\r\n0\r\n\r\n", 400),
        (TE + b"\r\nffffffffffffffff1\r\na\r\n0\r\n\r\n", 400),
        (TE + b"\r\n0\r\nContent-Length: 5\r\n\r\n", 400),
        (TE + b"\r\n0\r\nx: a\r\n folded\r\n\r\n", 400),
        (TE + b"\r\n0\r\n\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551620\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4, 4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length : 4\r\n\r\nabcd", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\rY: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: coffee\r\n\r\n", 417),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
        (b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
)
async def test_requests_that_two_parsers_could_read_differently_are_refused(request_bytes: bytes, status: int) -> None:
    handled: list[str] = []
    async with serving(lambda e: handled.append(e.path)) as server:
        answer = await send_and_read(server.port, request_bytes + b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer
    assert handled == []


async def test_a_refusal_waits_for_the_answers_that_are_due() -> None:
    def later(exchange: Exchange) -> None:
        asyncio.get_running_loop().call_later(0.02, exchange.respond, 200, [], b"ok")

    async with serving(later) as server:
        answer = await send_and_read(server.port, GET + b"BAD\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK") and b"ok" + b"HTTP/1.1 400 Bad Request" in answer


async def test_limits_are_answered() -> None:
    post = b"POST / HTTP/1.1\r\nHost: x\r\n"
    chunk = b"40\r\n" + b"a" * 64 + b"\r\n"
    piece = b"a" * 200
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n"
    cases = [
        ([GET[:-2] + b"X: " + piece * 2 + b"\r\n\r\n"], b"HTTP/1.1 431"),
        ([GET[:-2] + b"X: ", *[piece] * 5], b"HTTP/1.1 431"),
        ([GET[:-2] + b"X: " + piece, piece + b"\r\n\r\n"], b"HTTP/1.1 431"),
        ([post + b"Content-Length: 101\r\n\r\n"], b"HTTP/1.1 413"),
        ([chunked + chunk, chunk], b"HTTP/1.1 413"),
        ([chunked + b"0\r\nT: ", *[piece] * 5], b"HTTP/1.1 413"),
        ([post + b"Content-Length: 100\r\n\r\n" + b"b" * 100], b"HTTP/1.1 200"),
    ]
    async with serving(echo, HttpLimits(header_bytes=300, body_bytes=100)) as server:
        for pieces, answer in cases:
            assert (await send_and_read(server.port, *pieces, pause_s=0.005)).startswith(answer), pieces


async def test_slow_heads_and_bodies_time_out() -> None:
    limits = HttpLimits(head_timeout_s=0.1, body_timeout_s=0.1, idle_timeout_s=0.1)
    async with serving(echo, limits) as server:
        for begun in (b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab"):
            reader, writer = await connect(server.port)
            writer.write(begun)
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
            writer.close()
        reader, writer = await connect(server.port)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stage", ["before_headers", "mid_stream"])
async def test_a_leaving_client_is_noticed_at_once(stage: str, reset: bool) -> None:
    gone_at: list[float] = []
    noticed = asyncio.Event()

    def hold(exchange: Exchange) -> None:
        def gone() -> None:
            gone_at.append(time.monotonic())
            noticed.set()

        exchange.on_gone = gone
        if stage == "mid_stream":
            exchange.start(200, [])
            exchange.write(b"one")

    async with serving(hold) as server:
        _, writer = await connect(server.port)
        writer.write(GET)
        await asyncio.sleep(0.05)
        left_at = time.monotonic()
        if reset:
            writer.transport.abort()
        else:
            writer.close()
        await asyncio.wait_for(noticed.wait(), 2)
        assert len(gone_at) == 1 and gone_at[0] - left_at < 0.5
        assert server.open_exchanges == 0


async def test_answers_after_the_client_left_do_nothing() -> None:
    exchanges: list[Exchange] = []
    async with serving(exchanges.append) as server:
        _, writer = await connect(server.port)
        writer.write(GET)
        await asyncio.sleep(0.02)
        writer.close()
        await asyncio.sleep(0.02)
        (exchange,) = exchanges
        assert exchange.gone
        exchange.start(200, [])
        exchange.write(b"x")
        exchange.finish()
        exchange.abort()


async def test_an_aborted_answer_is_visibly_broken() -> None:
    def broken(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-length", b"100")] if exchange.path == "/length" else [])
        exchange.write(b"part")
        exchange.abort()

    async with serving(broken) as server:
        for path in (b"/chunked", b"/length"):
            reader, writer = await connect(server.port)
            writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
            answer = await reader.read()
            assert b"part" in answer and not answer.endswith(b"0\r\n\r\n")
            writer.close()
        reader, writer = await connect(server.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            while await reader.read(100):
                pass
        writer.close()


async def test_a_body_that_differs_from_its_declared_length_breaks_the_connection() -> None:
    def wrong(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-length", b"3")])
        exchange.write(b"toolong" if exchange.path == "/long" else b"x")
        exchange.finish()

    async with serving(wrong) as server:
        for path in (b"/long", b"/short"):
            answer = await send_and_read(server.port, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path + GET)
            assert answer.count(b"HTTP/1.1") == 1 and b"toolong" not in answer


async def test_back_pressure_is_told_to_the_producer() -> None:
    flow: list[bool] = []

    def flood(exchange: Exchange) -> None:
        exchange.on_flow = flow.append
        exchange.start(200, [])
        for _ in range(300):
            exchange.write(b"x" * 65536)
        exchange.finish()

    async with serving(flood) as server:
        reader, writer = await connect(server.port)
        writer.write(CLOSE)
        await asyncio.sleep(0.05)
        assert flow == [False]
        received = len(await reader.read())
        assert received > 300 * 65536
        writer.close()


async def test_the_next_answer_learns_that_the_client_still_reads_slowly() -> None:
    flow: list[tuple[str, bool]] = []

    def flood(exchange: Exchange) -> None:
        exchange.on_flow = lambda wanted: flow.append((exchange.path, wanted))
        exchange.start(200, [])
        exchange.write(b"x" * 20_000_000)
        asyncio.get_running_loop().call_later(0.05, exchange.finish)

    async with serving(flood) as server:
        _, writer = await connect(server.port)
        writer.write(GET + GET.replace(b"/a", b"/b"))
        async with asyncio.timeout(10):
            while len(flow) < 2:  # noqa: ASYNC110  the exchange has no event for it
                await asyncio.sleep(0.01)
        assert flow == [("/a", False), ("/b", False)]
        writer.transport.abort()
        await asyncio.sleep(0.02)


async def test_drain_lets_open_exchanges_end_and_keeps_listening() -> None:
    exchanges: list[Exchange] = []
    async with serving(exchanges.append) as server:
        idle_reader, idle_writer = await connect(server.port)
        reader, writer = await connect(server.port)
        writer.write(GET)
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(server.drain(5))
        assert await idle_reader.read() == b""
        _, late_writer = await connect(server.port)
        late_writer.write(GET)
        await asyncio.sleep(0.02)
        assert len(exchanges) == 2 and not draining.done()
        exchanges[0].respond(200, [], b"first")
        exchanges[1].respond(503, [], b"")
        assert await draining is True
        assert (await reader.read()).endswith(b"first")
        for each in (writer, idle_writer, late_writer):
            each.close()


async def test_drain_gives_up_after_its_grace() -> None:
    async with serving(lambda exchange: None) as server:
        _, writer = await connect(server.port)
        writer.write(GET)
        await asyncio.sleep(0.02)
        assert await server.drain(0.05) is False
        writer.close()


async def test_a_failing_handler_costs_one_answer() -> None:
    def fail(exchange: Exchange) -> None:
        raise RuntimeError("mistake")

    async with serving(fail) as server:
        assert (await send_and_read(server.port, GET)).startswith(b"HTTP/1.1 500")
        assert (await send_and_read(server.port, GET)).startswith(b"HTTP/1.1 500")
