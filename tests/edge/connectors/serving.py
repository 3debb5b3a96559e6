"""A server that answers as it was told, for what connectors ask of a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct


class Answered(Struct, frozen=True):
    body: str | bytes = ""
    status: int = 200
    headers: Mapping[str, str] = {}


Pages = Mapping[str, Answered]  # "GET /path" -> what it answers; anything else is 404


class Asked(Struct):
    """What came in, in order."""

    lines: list[str] = []
    bodies: list[Any] = []


@asynccontextmanager
async def serving(pages: Pages, asked: Asked | None = None) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        line = f"{request.method} {request.path}"
        if asked is not None:
            asked.lines.append(line)
            body = await request.read()
            asked.bodies.append(msgspec.json.decode(body) if body else None)
        page = pages.get(line)
        if page is None:
            return web.Response(status=404)
        body = page.body if isinstance(page.body, bytes) else page.body.encode()
        return web.Response(status=page.status, body=body, headers=page.headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
