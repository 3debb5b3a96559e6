"""Bodies that are taken while they come: order, flow, early answers, and clients that do not keep their word."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvrelay.edge.http.exchange import Spoilt
from kvrelay.edge.http.heads import Header
from kvrelay.edge.http.limits import HttpLimits
from kvrelay.edge.http.server import Exchange, HttpServer, start_server
from tests.edge.http.raw import connect, send_and_read

POST = b"POST /up?a=1 HTTP/1.1\r\nHost: x\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
BODY = bytes(range(256)) * 16
LIMITS = HttpLimits(header_bytes=2000, body_bytes=100, streamed_body_bytes=2**30)


class Taker:
    """Handles every exchange; of an upload it takes everything, or as much as the test lets it."""

    def __init__(self, *, asks: bool = True) -> None:
        self.asks = asks
        self.exchanges: list[Exchange] = []
        self.received: dict[str, bytes] = {}
        self.gone: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        exchange.on_gone = lambda: self.gone.append(exchange)
        upload = exchange.upload
        if upload is None:
            exchange.respond(200, (), b"%b %d" % (exchange.path.encode(), len(exchange.body)))
            return
        self.received[exchange.path] = b""

        def take(data: bytes) -> None:
            self.received[exchange.path] += data

        def end(trailers: Sequence[Header]) -> None:
            told = b",".join(b"%b=%b" % trailer for trailer in trailers)
            exchange.respond(200, (), b"%d bytes %b" % (len(self.received[exchange.path]), told))

        upload.on_data, upload.on_end = take, end
        if self.asks:
            upload.set_flow(True)


async def serving(taker: Taker, limits: HttpLimits = LIMITS, hold: int | None = 100) -> HttpServer:
    return await start_server(taker, host="127.0.0.1", port=0, limits=limits, held_at_most=lambda path, headers: hold)


async def closed(server: HttpServer) -> None:
    await server.close()
    await asyncio.sleep(0.01)


def with_length(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, *, size: int = 1000, trailers: bytes = b"") -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return POST + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n" + trailers + b"\r\n"


async def until(condition: object, within_s: float = 5.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  what tests wait for is seldom an event of theirs
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("step", [13, 500, 3000])
@pytest.mark.parametrize(
    "request_bytes",
    [
        with_length(BODY),
        chunked(BODY),
        chunked(BODY, trailers=b"x-sum: 1\r\nX-T: 2\r\n"),
        with_length(BODY).replace(b"Host: x", b"Host: x\r\nConnection: Upgrade\r\nUpgrade: h2c", 1),
    ],
    ids=["length", "chunked", "trailers", "upgrade"],
)
async def test_a_large_body_comes_in_pieces_and_the_next_request_is_found_behind_it(
    request_bytes: bytes, step: int
) -> None:
    taker = Taker()
    server = await serving(taker)
    everything = request_bytes + LAST
    pieces = [everything[i : i + step] for i in range(0, len(everything), step)]
    answer = await send_and_read(server.port, *pieces, pause_s=0 if step < 100 else 0.002)
    assert taker.received == {"/up": BODY}
    assert b"4096 bytes" in answer and answer.endswith(b"/last 0")
    assert (b"x-sum=1,X-T=2" in answer) is (b"x-sum" in request_bytes)
    assert taker.gone == []
    await closed(server)


async def test_small_bodies_and_those_of_paths_that_are_read_whole_are_whole() -> None:
    taker = Taker()
    server = await serving(taker, HttpLimits(body_bytes=5000), hold=None)
    for request in (with_length(BODY), chunked(BODY, trailers=b"x-t: 1\r\n")):
        await send_and_read(server.port, request[:50], request[50:], pause_s=0.02)
    assert [exchange.body for exchange in taker.exchanges] == [BODY, BODY]
    assert [list(exchange.trailers) for exchange in taker.exchanges] == [[], [(b"x-t", b"1")]]
    await closed(server)
    taker = Taker()
    server = await serving(taker, hold=4096)
    await send_and_read(server.port, with_length(b"a" * 60)[:-20], b"a" * 20, pause_s=0.02)
    assert taker.exchanges[0].upload is None and taker.exchanges[0].body == b"a" * 60
    await closed(server)


async def test_nobody_asks_so_the_client_has_to_wait() -> None:
    """Back-pressure reaches the client's own socket: what we took of 64 MB is what system buffers hold."""
    taker = Taker(asks=False)
    server = await serving(taker)
    reader, writer = await connect(server.port)
    size = 64 * 2**20
    writer.write(POST + b"Content-Length: %d\r\n\r\n" % size)
    sent = asyncio.create_task(_send_all(writer, size))
    await until(lambda: taker.exchanges)
    await asyncio.sleep(0.2)
    assert not sent.done() and taker.received == {"/up": b""}
    upload = taker.exchanges[0].upload
    assert upload is not None
    counted = 0

    def count(data: bytes) -> None:
        nonlocal counted
        counted += len(data)
        upload.set_flow(False)  # one read at a time
        asyncio.get_running_loop().call_soon(upload.set_flow, True)

    upload.on_data = count
    upload.set_flow(True)
    async with asyncio.timeout(60):
        await sent
        assert (await reader.readuntil(b"bytes")).startswith(b"HTTP/1.1 200 OK")
    assert counted == size
    writer.close()
    await closed(server)


async def _send_all(writer: asyncio.StreamWriter, size: int) -> None:
    piece = b"x" * 2**20
    for _ in range(size // len(piece)):
        writer.write(piece)
        await writer.drain()


async def test_who_expects_100_is_told_to_go_on_when_somebody_takes_the_body() -> None:
    taker = Taker(asks=False)
    server = await serving(taker)
    reader, writer = await connect(server.port)
    writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 4096\r\n\r\n")
    await until(lambda: taker.exchanges)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(100), 0.05)
    upload = taker.exchanges[0].upload
    assert upload is not None
    upload.set_flow(True)
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert b"200 OK" in await reader.readuntil(b"bytes")
    writer.close()
    await closed(server)


async def test_who_expects_100_and_is_refused_never_sends_the_body() -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.respond(401, (), b"no")

    server = await start_server(refuse, host="127.0.0.1", port=0, limits=LIMITS, held_at_most=lambda p, h: 100)
    answer = await send_and_read(server.port, POST + b"Expect: 100-continue\r\nContent-Length: 4096\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401") and b"connection: close" in answer and b"100 Continue" not in answer
    await closed(server)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_before_the_end_of_the_body_is_the_last_of_its_connection(streams: bool) -> None:
    """The rest of the body, which looks like a request here, is thrown away and never parsed."""
    handled: list[str] = []

    def early(exchange: Exchange) -> None:
        handled.append(exchange.path)
        if streams:
            exchange.start(413, ())
            exchange.write(b"too large")
            exchange.finish()
        else:
            exchange.respond(413, (), b"too large")

    server = await start_server(early, host="127.0.0.1", port=0, limits=LIMITS, held_at_most=lambda p, h: 100)
    reader, writer = await connect(server.port)
    writer.write(POST + b"Content-Length: 40000000\r\n\r\n")
    inner = LAST * 1000
    async with asyncio.timeout(20):
        for _ in range(100):  # sends on although the answer has come long since
            writer.write(inner)
            await writer.drain()
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 413") and b"too large" in answer and b"connection: close" in answer
    assert answer.count(b"HTTP/1.1") == 1 and handled == ["/up"]
    writer.close()
    await closed(server)


async def test_an_unwanted_body_is_not_thrown_away_for_ever() -> None:
    def early(exchange: Exchange) -> None:
        exchange.respond(413, (), b"")

    limits = HttpLimits(body_bytes=100, streamed_body_bytes=2**40, linger_s=60, discard_s=0.2)
    server = await start_server(early, host="127.0.0.1", port=0, limits=limits, held_at_most=lambda p, h: 100)
    _, writer = await connect(server.port)
    writer.write(POST + b"Content-Length: %d\r\n\r\n" % 2**39)
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(20):
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                await asyncio.sleep(0.005)
    writer.close()
    await closed(server)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_in_mid_upload_is_noticed_once(reset: bool) -> None:
    taker = Taker()
    server = await serving(taker)
    _, writer = await connect(server.port)
    writer.write(with_length(BODY)[:2000])
    await until(lambda: taker.received.get("/up"))
    if reset:
        writer.transport.abort()
    else:
        writer.close()
    await until(lambda: taker.gone)
    assert taker.gone == taker.exchanges and taker.exchanges[0].spoilt is None
    assert server.open_exchanges == 0
    await closed(server)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (chunked(BODY)[:-5] + b"zz\r\n", 400),
        (chunked(BODY * 3)[:-7], 413),
        (chunked(BODY)[:-2] + b"t: " + b"a" * 5000, 413),
        (chunked(BODY)[:-4] + b"5;" + b"a" * 5000, 413),
        (with_length(BODY)[:3000], 408),
    ],
    ids=["bad chunk", "too large", "endless trailer", "endless extension", "silence"],
)
async def test_the_rest_of_a_body_that_cannot_be_taken_is_refused_and_the_handler_told(
    sent: bytes, status: int
) -> None:
    limits = HttpLimits(header_bytes=2000, body_bytes=100, streamed_body_bytes=10_000, body_timeout_s=0.3)
    taker = Taker()
    server = await serving(taker, limits)
    reader, writer = await connect(server.port)
    writer.write(sent[:1500])
    await until(lambda: taker.exchanges)
    for start in range(1500, len(sent), 1000):
        writer.write(sent[start : start + 1000])
        await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 %d" % status) and answer.count(b"HTTP/1.1") == 1, answer
    (exchange,) = taker.gone
    assert exchange.spoilt is not None and exchange.spoilt.http_status == status
    assert server.open_exchanges == 0
    writer.close()
    await closed(server)


async def test_an_answer_that_had_begun_is_broken_off_when_its_request_goes_wrong() -> None:
    taker = Taker()
    server = await serving(taker)
    reader, writer = await connect(server.port)
    writer.write(chunked(BODY)[:-5])
    await until(lambda: taker.exchanges)
    taker.exchanges[0].start(200, ())
    taker.exchanges[0].write(b"so far")
    assert b"so far" in await reader.readuntil(b"so far")
    writer.write(b"no chunk at all\r\n")
    async with asyncio.timeout(5):
        assert not (await reader.read()).endswith(b"0\r\n\r\n")
    assert taker.gone == taker.exchanges
    spoilt = taker.exchanges[0].spoilt
    assert isinstance(spoilt, Spoilt) and spoilt.http_status == 400
    writer.close()
    await closed(server)


async def test_an_upload_waits_for_its_turn() -> None:
    taker = Taker()
    first: list[Exchange] = []

    def handle(exchange: Exchange) -> None:
        if exchange.path == "/first":
            first.append(exchange)
        else:
            taker(exchange)

    server = await start_server(handle, host="127.0.0.1", port=0, limits=LIMITS, held_at_most=lambda p, h: 100)
    reader, writer = await connect(server.port)
    writer.write(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\n" + with_length(BODY)[:2000])
    await until(lambda: first)
    writer.write(with_length(BODY)[2000:] + LAST)
    await asyncio.sleep(0.05)
    assert taker.exchanges == []
    first[0].respond(200, (), b"one")
    async with asyncio.timeout(5):
        answer = await reader.read()
    order = [answer.index(part) for part in (b"one", b"4096 bytes", b"/last 0")]
    assert order == sorted(order) and taker.received == {"/up": BODY}
    writer.close()
    await closed(server)


async def test_a_declared_length_beyond_every_limit_is_refused_at_its_head() -> None:
    taker = Taker()
    server = await serving(taker)
    answer = await send_and_read(server.port, POST + b"Content-Length: %d\r\n\r\n" % (2**30 + 1))
    assert answer.startswith(b"HTTP/1.1 413") and b"1073741824" in answer and taker.exchanges == []
    await closed(server)
