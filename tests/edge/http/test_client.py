"""The upstream pool against servers that the test writes byte by byte."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvrelay.core.model.units import Fault
from kvrelay.edge.http.client import Call, CallTimeouts, Origin, PoolLimits, UpstreamPool
from kvrelay.edge.http.heads import Header
from tests.garbage import ours_left_as_garbage

REQUEST = b"GET / HTTP/1.1\r\nhost: w\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Noted:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.over = asyncio.Event()

    def on_accepted(self) -> None:
        self.heard.append("accepted")

    def on_interim(self, status: int, headers: list[Header]) -> None:
        self.heard.append((status, headers))

    def on_head(self, status: int, headers: list[Header]) -> None:
        self.heard.append(status)

    def on_data(self, data: bytes) -> None:
        self.heard.append(data)

    def on_end(self) -> None:
        self.heard.append("end")
        self.over.set()

    def on_error(self, fault: Fault, detail: str) -> None:
        assert detail
        self.heard.append(fault)
        self.over.set()


class Upstream:
    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.connections = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def upstream(serve: Serve, limits: PoolLimits | None = None) -> AsyncIterator[tuple[UpstreamPool, Upstream]]:
    server_side = Upstream(serve)
    server = await asyncio.start_server(server_side.serve, "127.0.0.1", 0)
    server_side.port = server.sockets[0].getsockname()[1]
    pool = UpstreamPool(limits)
    try:
        yield pool, server_side
    finally:
        pool.close()
        server.close()
        await asyncio.sleep(0.02)


async def call(
    pool: UpstreamPool, port: int, timeouts: CallTimeouts | None = None, *, head: bool = False
) -> list[object]:
    noted = Noted()
    pool.request(Origin("127.0.0.1", port), REQUEST, noted, timeouts or CallTimeouts(), head=head)
    async with asyncio.timeout(5):
        await noted.over.wait()
    return noted.heard


def answering(*pieces: bytes, close: bool = False) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.005)
            if close:
                return

    return serve


async def test_connections_are_kept_and_used_again() -> None:
    async with upstream(answering(OK)) as (pool, server):
        for _ in range(3):
            assert await call(pool, server.port) == ["accepted", 200, b"ok", "end"]
        assert server.connections == 1 and pool.open_calls == 0


@pytest.mark.parametrize("cut", range(1, len(OK)))
async def test_an_answer_may_come_in_any_pieces(cut: int) -> None:
    async with upstream(answering(OK[:cut], OK[cut:])) as (pool, server):
        heard = await call(pool, server.port)
        assert heard[:2] == ["accepted", 200] and heard[-1] == "end"
        assert b"".join(piece for piece in heard if isinstance(piece, bytes)) == b"ok"


async def test_chunked_bodies_interim_answers_and_trailers() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\nt: 1\r\n\r\n"
    async with upstream(answering(b"HTTP/1.1 100 Continue\r\n\r\n" + interim + chunked)) as (pool, server):
        for _ in range(2):
            noted = Noted()
            begun = pool.request(Origin("127.0.0.1", server.port), REQUEST, noted, CallTimeouts())
            await asyncio.wait_for(noted.over.wait(), 5)
            assert noted.heard == ["accepted", (103, [(b"link", b"x")]), 200, b"abc", "end"]
            assert begun.trailers == [(b"t", b"1")]
        assert server.connections == 1


async def test_a_body_that_ends_with_the_connection() -> None:
    async with upstream(answering(b"HTTP/1.1 200 OK\r\n\r\nall", close=True)) as (pool, server):
        assert await call(pool, server.port) == ["accepted", 200, b"all", "end"]


async def test_the_answer_to_head_has_no_body() -> None:
    async with upstream(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")) as (pool, server):
        assert await call(pool, server.port, head=True) == ["accepted", 200, "end"]


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        (b"", ["accepted", Fault.RESET]),
        (b"HTTP/1.1 200 OK\r\ncontent-le", ["accepted", Fault.RESET]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart", ["accepted", 200, b"part", Fault.RESET]),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npart\r\n",
            ["accepted", 200, b"part", Fault.RESET],
        ),
        (b"nonsense\r\n\r\n", ["accepted", Fault.GARBAGE]),
        (CHUNKED + b"zz\r\n", ["accepted", 200, Fault.GARBAGE]),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 300_000, ["accepted", Fault.GARBAGE]),
        (CHUNKED + b"0\r\nx: " + b"a" * 600_000, ["accepted", 200, Fault.GARBAGE]),
        (CHUNKED + b"5;" + b"a" * 600_000, ["accepted", 200, Fault.GARBAGE]),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
            ["accepted", Fault.GARBAGE],
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n", ["accepted", Fault.RESET]),
    ],
)
async def test_what_is_wrong_with_an_answer_is_said_once(answer: bytes, heard: list[object]) -> None:
    async with upstream(answering(answer, close=True)) as (pool, server):
        assert await call(pool, server.port) == heard
        assert pool.open_calls == 0


async def test_nobody_listens() -> None:
    async with upstream(answering(OK)) as (pool, server):
        pass
    pool = UpstreamPool()
    with ours_left_as_garbage() as left:
        for _ in range(3):
            assert await call(pool, server.port) == [Fault.CONNECT]
    assert left == {}, "a worker that is down for long is asked again and again"
    pool.close()


async def test_a_worker_that_takes_no_connections_runs_out_of_time() -> None:
    """Its queue is full, so the system answers no further connection; as does a host that is not there."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        pool = UpstreamPool()
        assert await call(pool, full.getsockname()[1], CallTimeouts(connect_s=0.3)) == [Fault.CONNECT_TIMEOUT]
        pool.close()
        for each in waiting:
            each.close()


async def test_a_worker_that_never_answers_a_tls_greeting_runs_out_of_time() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with upstream(serve) as (pool, server):
        noted = Noted()
        origin = Origin("127.0.0.1", server.port, ssl.create_default_context())
        pool.request(origin, REQUEST, noted, CallTimeouts(connect_s=0.3))
        await asyncio.wait_for(noted.over.wait(), 5)
        assert noted.heard == [Fault.CONNECT_TIMEOUT]


async def test_a_stale_kept_connection_is_replaced_once_unseen() -> None:
    """The second request finds a connection that its server closes on sight, as after a keep-alive timeout."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async with upstream(serve) as (pool, server):
        assert await call(pool, server.port) == ["accepted", 200, b"ok", "end"]
        assert await call(pool, server.port) == ["accepted", "accepted", 200, b"ok", "end"]
        assert server.connections == 2


async def test_a_kept_connection_that_breaks_late_is_not_repeated() -> None:
    """The worker may have begun: that is for the router to decide."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.6)
        writer.transport.abort()

    async with upstream(serve) as (pool, server):
        await call(pool, server.port)
        assert await call(pool, server.port) == ["accepted", Fault.RESET]
        assert server.connections == 1


async def test_an_answer_to_nothing_costs_the_connection() -> None:
    async with upstream(answering(OK + OK)) as (pool, server):
        assert await call(pool, server.port) == ["accepted", 200, b"ok", "end"]
        await asyncio.sleep(0.02)
        assert await call(pool, server.port) == ["accepted", 200, b"ok", "end"]
        assert server.connections == 2


async def test_abort_closes_the_connection_at_once_and_says_nothing() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.read()
        closed.set()

    async with upstream(serve) as (pool, server):
        noted = Noted()
        begun = pool.request(Origin("127.0.0.1", server.port), REQUEST, noted, CallTimeouts())
        await asyncio.sleep(0.02)
        begun.abort()
        begun.abort()
        await asyncio.wait_for(closed.wait(), 1)
        assert noted.heard == ["accepted"] and pool.open_calls == 0


async def test_abort_while_connecting() -> None:
    async with upstream(answering(OK)) as (pool, server):
        noted = Noted()
        pool.request(Origin("127.0.0.1", server.port), REQUEST, noted, CallTimeouts()).abort()
        await asyncio.sleep(0.05)
        assert noted.heard == [] and pool.open_calls == 0


async def test_idle_connections_are_closed_before_the_worker_would() -> None:
    async with upstream(answering(OK), PoolLimits(idle_s=0.05)) as (pool, server):
        await call(pool, server.port)
        await asyncio.sleep(0.3)
        await call(pool, server.port)
        assert server.connections == 2


async def test_framing_that_comes_in_drops_is_not_taken_for_an_endless_trailer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        for _ in range(60):
            for piece in (b"1;%b\r\n" % (b"e" * 30), b"a\r\n"):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")

    async with upstream(serve, PoolLimits(head_bytes=200)) as (pool, server):
        heard = await call(pool, server.port)
        assert heard[-1] == "end" and b"".join(each for each in heard if isinstance(each, bytes)) == b"a" * 60


# --- bodies that follow their head -----------------------------------------------------------------------------------

HEAD = b"POST /up HTTP/1.1\r\nhost: w\r\ncontent-length: %d\r\n\r\n"


class Sending(Noted):
    """Sends a body of `size` as fast as the worker takes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.left = size
        self.flow: list[bool] = []
        self.told = asyncio.Event()
        self.call: Call | None = None

    def begin(self, pool: UpstreamPool, port: int, timeouts: CallTimeouts | None = None) -> None:
        origin = Origin("127.0.0.1", port)
        head = HEAD % self.left
        self.call = pool.request(origin, head, self, timeouts or CallTimeouts(), on_writable=self.on_writable)

    def on_accepted(self) -> None:
        super().on_accepted()
        self._send()

    def on_writable(self, writable: bool) -> None:
        self.flow.append(writable)
        self.told.set()
        if writable:
            self._send()

    def _send(self) -> None:
        assert self.call is not None
        while self.left and self.call.writable:
            piece = b"x" * min(self.left, 65536)
            self.left -= len(piece)
            self.call.send(piece)
        if not self.left and self.call.body_open:
            self.call.end_body()


async def test_a_body_is_sent_as_fast_as_the_worker_takes_it() -> None:
    size = 20_000_000
    go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go.wait()
        await reader.readexactly(size)
        writer.write(OK)
        await reader.read()

    async with upstream(serve) as (pool, server):
        sending = Sending(size)
        sending.begin(pool, server.port)
        await asyncio.wait_for(sending.told.wait(), 5)
        assert sending.flow == [False] and sending.left > size // 4
        go.set()
        await asyncio.wait_for(sending.over.wait(), 30)
        assert sending.heard == ["accepted", 200, b"ok", "end"] and sending.left == 0
        assert sending.flow[:2] == [False, True]
        assert sending.call is not None and sending.call.on_writable is None
        assert await call_again(pool, server.port) == ["accepted"] and server.connections == 1


async def call_again(pool: UpstreamPool, port: int) -> list[object]:
    """What a next call hears at once: on a kept connection it is accepted without a wait."""
    noted = Noted()
    pool.request(Origin("127.0.0.1", port), REQUEST, noted, CallTimeouts()).abort()
    return noted.heard


async def test_such_a_call_never_goes_on_a_kept_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(10 if b"POST" in head else 0)
        writer.write(OK)
        await reader.read()

    async with upstream(serve) as (pool, server):
        await call(pool, server.port)
        sending = Sending(10)
        sending.begin(pool, server.port)
        await asyncio.wait_for(sending.over.wait(), 5)
        assert sending.heard == ["accepted", 200, b"ok", "end"] and server.connections == 2


async def test_an_answer_before_the_end_of_the_body_ends_the_call_and_the_connection() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nno")
        try:
            while await reader.read(65536):
                pass
        finally:
            closed.set()

    async with upstream(serve) as (pool, server):
        sending = Sending(2**40)
        sending.begin(pool, server.port)
        await asyncio.wait_for(sending.over.wait(), 5)
        assert sending.heard == ["accepted", 413, b"no", "end"] and pool.open_calls == 0
        await asyncio.wait_for(closed.wait(), 5)
        sending.call.send(b"late")  # type: ignore[union-attr]  what still comes of the body goes nowhere


async def test_a_worker_that_stops_reading_runs_out_of_time_and_a_slow_client_does_not() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(30)

    async with upstream(serve) as (pool, server):
        timeouts = CallTimeouts(first_byte_s=0.2, idle_s=0.2)
        stuck, slow = Sending(2**40), Sending(0)
        slow.left = 10
        slow.on_accepted = lambda: slow.heard.append("accepted")  # type: ignore[method-assign]  sends nothing yet
        slow.begin(pool, server.port, timeouts)
        stuck.begin(pool, server.port, timeouts)
        await asyncio.wait_for(stuck.over.wait(), 5)
        assert stuck.heard == ["accepted", Fault.IDLE_TIMEOUT]
        assert slow.heard == ["accepted"]
        assert slow.call is not None
        slow.call.end_body(b"x" * 10)
        await asyncio.wait_for(slow.over.wait(), 5)
        assert slow.heard == ["accepted", Fault.FIRST_BYTE_TIMEOUT]
