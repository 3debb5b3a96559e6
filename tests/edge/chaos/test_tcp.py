"""The TCP proxy on real sockets, before a server that answers each line with itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvrelay.edge.chaos.tcp import TcpProxy
from kvrelay.edge.chaos.tcp_control import serve_control

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """Echoes what it gets, and keeps how each connection ended."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ends: list[str] = []
        self.answers_after_end = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                self.received += data
                writer.write(data)
                await writer.drain()
            self.ends.append("end of stream")
            writer.write(self.answers_after_end)
            await writer.drain()
        except ConnectionError:
            self.ends.append("reset")
        finally:
            writer.close()


@asynccontextmanager
async def proxied(script: str = "") -> AsyncIterator[tuple[TcpProxy, Server]]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        async with TcpProxy("127.0.0.1", port, script=script) as proxy:
            yield proxy, server
    finally:
        listening.close()


_connected: list[Stream] = []


@pytest.fixture(autouse=True)
async def hang_up() -> AsyncIterator[None]:
    yield
    for _, writer in _connected:
        writer.close()
    _connected.clear()


async def connect(proxy: TcpProxy) -> Stream:
    stream = await asyncio.open_connection("127.0.0.1", proxy.port)
    _connected.append(stream)
    return stream


async def echo(stream: Stream, data: bytes) -> bytes:
    stream[1].write(data)
    await stream[1].drain()
    return await stream[0].readexactly(len(data))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the proxy tells nobody
            await asyncio.sleep(0.005)


async def silent(stream: Stream, for_s: float = 0.1) -> bool:
    try:
        async with asyncio.timeout(for_s):
            return not await stream[0].read(1) and False
    except TimeoutError:
        return True


async def test_without_a_script_bytes_and_both_ends_pass_as_they_are() -> None:
    async with proxied() as (proxy, server):
        server.answers_after_end = b"and goodbye"
        stream = await connect(proxy)
        payload = bytes(range(256)) * 2000
        assert await echo(stream, payload) == payload
        stream[1].write_eof()
        assert await stream[0].read() == b"and goodbye"
        await until(lambda: not proxy.state()["open"])
        assert server.ends == ["end of stream"]
        assert proxy.state() | {"open": 0} == {
            "open": 0, "connections": 1, "bytes_up": len(payload), "bytes_down": len(payload) + 11,
            "in_force": [], "planned": 0,
        }  # fmt: skip


async def test_latency_delays_and_does_not_throttle() -> None:
    async with proxied("latency 150ms") as (proxy, _):
        stream = await connect(proxy)
        began = time.monotonic()
        await echo(stream, b"x" * 500_000)
        assert time.monotonic() - began >= 0.3  # once each way; a delay per piece would be seconds
        proxy.do("clear; down latency 100ms")
        began = time.monotonic()
        await echo(stream, b"y")
        assert time.monotonic() - began >= 0.1


async def test_a_bandwidth_is_shared_by_all_connections() -> None:
    async with proxied("up bandwidth 100kB/s") as (proxy, _):
        began = time.monotonic()
        await asyncio.gather(*[echo(await connect(proxy), b"x" * 10_000) for _ in range(3)])
        assert time.monotonic() - began >= 0.25


async def test_a_stall_keeps_the_bytes_of_one_way_and_leaves_the_other() -> None:
    async with proxied() as (proxy, server):
        stream = await connect(proxy)
        await echo(stream, b"a")
        proxy.do("down stall")
        stream[1].write(b"bc")
        await until(lambda: bytes(server.received) == b"abc")
        assert await silent(stream)
        proxy.do("clear")
        assert await stream[0].readexactly(2) == b"bc"


async def test_a_blackhole_loses_bytes_and_who_lost_some_is_reset_at_its_end() -> None:
    async with proxied() as (proxy, server):
        stream, unhurt = await connect(proxy), await connect(proxy)
        await echo(stream, b"a")
        await echo(unhurt, b"b")
        proxy.do("blackhole")
        stream[1].write(b"lost")
        newcomer = await connect(proxy)
        assert await silent(stream) and await silent(newcomer)
        assert bytes(server.received) == b"ab"
        proxy.do("clear")
        with pytest.raises(ConnectionResetError):
            await stream[0].readexactly(1)
        assert await echo(unhurt, b"c") == b"c"


async def test_reset_strikes_what_is_open_and_nothing_later() -> None:
    async with proxied() as (proxy, server):
        stream = await connect(proxy)
        await echo(stream, b"a")
        proxy.do("reset")
        with pytest.raises(ConnectionResetError):
            await stream[0].readexactly(1)
        await until(lambda: server.ends == ["reset"])
        assert await echo(await connect(proxy), b"b") == b"b"


@pytest.mark.parametrize("how", ["truncate 5", "reset after 5"])
async def test_each_connection_ends_after_its_bytes(how: str) -> None:
    async with proxied(f"down {how}") as (proxy, _):
        for _ in range(2):
            stream = await connect(proxy)
            stream[1].write(b"123456789")
            if how.startswith("truncate"):
                assert await stream[0].read() == b"12345"
            else:
                with pytest.raises(ConnectionResetError):
                    while await stream[0].read(100):
                        pass
        await until(lambda: not proxy.state()["open"])


async def test_half_close_ends_one_way_and_the_other_goes_on() -> None:
    async with proxied() as (proxy, server):
        server.answers_after_end = b"still here"
        stream = await connect(proxy)
        await echo(stream, b"a")
        proxy.do("up half-close")
        assert await stream[0].read() == b"still here"
        assert server.ends == ["end of stream"]


async def test_nobody_listens_while_it_refuses() -> None:
    async with proxied("at 50ms refuse for 300ms") as (proxy, _):
        before = await connect(proxy)
        await until(lambda: proxy.state()["in_force"])
        with pytest.raises(ConnectionRefusedError):
            await connect(proxy)
        assert await echo(before, b"a") == b"a"
        await until(lambda: not proxy.state()["in_force"])
        async with asyncio.timeout(5):
            while True:
                try:
                    assert await echo(await connect(proxy), b"b") == b"b"
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.01)


async def test_a_service_that_is_not_there_is_a_reset() -> None:
    async with proxied() as (proxy, _):
        port = proxy.port
    async with TcpProxy("127.0.0.1", port) as proxy:
        stream = await connect(proxy)
        with pytest.raises(ConnectionResetError):
            await stream[0].readexactly(1)


async def test_the_control_port_takes_orders_and_refuses_browsers() -> None:
    async with proxied() as (proxy, _):
        runner, port = await serve_control(proxy, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{port}/"
        try:
            async with aiohttp.ClientSession() as session:
                async with session.post(url, data="latency 5ms; at 9s reset") as response:
                    assert (await response.json())["in_force"] == ["latency 5ms"]
                async with session.get(url) as response:
                    assert (await response.json())["planned"] == 1
                async with session.post(url, data="latncy 5ms") as response:
                    assert response.status == 400 and "did you mean `latency`" in (await response.json())["error"]
                async with session.post(url, data="clear", headers={"origin": "http://evil"}) as response:
                    assert response.status == 403
            assert proxy.state()["planned"] == 1
        finally:
            await runner.cleanup()
