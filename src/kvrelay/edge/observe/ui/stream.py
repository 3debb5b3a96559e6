"""Server-sent events to everybody who watches the live page, bounded in every direction.

One picture is made per tick for all, and none while nobody watches. A client has no queue: whoever is slow misses
pictures, and whoever takes nothing for `SLOW_S` is let go. Making a picture may take a fiftieth of the time at most; if
it takes longer, they become rarer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

MAX_WATCHERS = 16
TICK_S = 1.0
LARGEST_SHARE = 0.02  # of one core
SLOW_S = 10.0

log = logging.getLogger(__name__)


class Stream:
    """`paint` makes the next picture."""

    def __init__(
        self, paint: Callable[[], Awaitable[bytes]], *, tick_s: float = TICK_S, slow_s: float = SLOW_S
    ) -> None:
        self.watchers = 0
        self.painted = 0
        self._paint = paint
        self._tick_s = tick_s
        self._slow_s = slow_s
        self._latest = b""
        self._news = asyncio.Event()
        self._painter: asyncio.Task[None] | None = None
        self._closing = False

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Until the client leaves, is too slow, or everything ends."""
        if self.watchers >= MAX_WATCHERS:
            return web.json_response({"error": f"{MAX_WATCHERS} pages watch already"}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        self.watchers += 1
        try:
            await response.prepare(request)
            self._wake_painter()
            await self._pictures_to(response)
        except (ConnectionError, TimeoutError):
            pass  # it left, or takes nothing
        finally:
            self.watchers -= 1
        return response

    async def tick(self) -> None:
        """The next picture, to all who watch."""
        try:
            self._latest = await self._paint()
            self.painted += 1
        except Exception:
            log.exception("the live page could not be drawn")
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def close(self) -> None:
        """Lets everybody go; may be called again."""
        self._closing = True
        self._news.set()
        if self._painter is not None:
            self._painter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._painter
            self._painter = None

    async def _pictures_to(self, response: web.StreamResponse) -> None:
        while not self._closing:
            news, picture = self._news, self._latest
            if picture:
                await asyncio.wait_for(response.write(b"data: " + picture + b"\n\n"), self._slow_s)
            await news.wait()

    def _wake_painter(self) -> None:
        if self._painter is None or self._painter.done():
            self._latest = b""  # whoever comes after a pause is not shown the past
            self._painter = asyncio.get_running_loop().create_task(self._paint_while_watched())

    async def _paint_while_watched(self) -> None:
        while self.watchers and not self._closing:
            began_s = time.process_time()
            await self.tick()
            took_s = time.process_time() - began_s
            await asyncio.sleep(max(self._tick_s, took_s / LARGEST_SHARE))
