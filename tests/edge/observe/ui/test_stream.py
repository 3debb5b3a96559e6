"""The stream is bounded: pictures are made only for watchers, once for all, and who takes nothing is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from kvrelay.edge.observe.ui import stream as module
from kvrelay.edge.observe.ui.stream import Stream
from tests.edge.gateway.scripted import until


class Painted:
    def __init__(self, size: int = 10) -> None:
        self.count = 0
        self.size = size

    async def __call__(self) -> bytes:
        self.count += 1
        return str(self.count).encode().rjust(self.size, b" ")


@asynccontextmanager
async def serving(stream: Stream) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.get("/stream", stream.serve)])

    async def close(_: web.Application) -> None:
        await stream.close()

    app.on_shutdown.append(close)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/stream"
    finally:
        async with asyncio.timeout(5):
            await runner.cleanup()


async def test_one_picture_serves_all_who_watch_and_none_is_made_for_nobody() -> None:
    paint = Painted()
    stream = Stream(paint, tick_s=0.01)
    async with serving(stream) as url, aiohttp.ClientSession() as client:
        await asyncio.sleep(0.05)
        assert paint.count == 0
        async with AsyncExitStack() as watching:
            answers = [await watching.enter_async_context(client.get(url)) for _ in range(3)]
            for answer in answers:
                assert (await answer.content.readline()).startswith(b"data: ")
            assert answers[0].headers["Content-Type"] == "text/event-stream"
        await until(lambda: stream.watchers == 0)
        await asyncio.sleep(0.05)
        rested = paint.count
        await asyncio.sleep(0.05)
        assert paint.count == rested


async def test_no_more_may_watch_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WATCHERS", 2)
    stream = Stream(Painted(), tick_s=0.01)
    async with serving(stream) as url, aiohttp.ClientSession() as client, client.get(url):
        async with client.get(url), client.get(url) as refused:
            assert refused.status == 503
        await until(lambda: stream.watchers == 1)
        async with client.get(url) as third:
            assert third.status == 200


async def test_whoever_takes_nothing_is_let_go_and_nothing_piles_up_meanwhile() -> None:
    paint = Painted(size=2_000_000)
    stream = Stream(paint, tick_s=0.01, slow_s=0.3)
    async with serving(stream) as url:
        host, port = url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: stream.watchers == 1)
        await until(lambda: stream.watchers == 0, within_s=10)
        assert paint.count < 200, "pictures that nobody took were not kept for it"
        writer.close()
        del reader


async def test_a_picture_that_fails_does_not_end_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def paint() -> bytes:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("no process answers")
        return b"{}"

    async with serving(Stream(paint, tick_s=0.01)) as url, aiohttp.ClientSession() as client, client.get(url) as answer:
        assert await answer.content.readline() == b"data: {}\n"
    assert "could not be drawn" in caplog.text


async def test_the_end_of_the_gateway_ends_the_streams() -> None:
    stream = Stream(Painted(), tick_s=0.01)
    async with aiohttp.ClientSession() as client:
        async with serving(stream) as url:
            answer = await client.get(url)
            await answer.content.readline()
        async with asyncio.timeout(2), answer:
            await answer.content.read()
