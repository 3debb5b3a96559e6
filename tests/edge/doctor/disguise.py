"""A mock worker seen through a front that changes some of its answers: engines set up wrongly, without an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

Change = Callable[[int, bytes, dict[str, str]], tuple[int, bytes, dict[str, str]]]
"""Status, body and headers of an answer, before and after."""


@asynccontextmanager
async def disguised(url: str, changes: dict[str, Change]) -> AsyncIterator[str]:
    """The worker at `url` under another URL; answers of the paths in `changes` are changed."""
    async with aiohttp.ClientSession() as session:

        async def relay(request: web.Request) -> web.Response:
            body = await request.read()
            kind = {"content-type": "application/json"} if body else {}
            async with session.request(request.method, url + request.path_qs, data=body, headers=kind) as answer:
                passed = {
                    name: answer.headers[name] for name in ("content-type", "x-kvrelay-mock") if name in answer.headers
                }
                found = answer.status, await answer.read(), passed
            change = changes.get(request.path)
            status, content, headers = found if change is None else change(*found)
            return web.Response(status=status, body=content, headers=headers)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", relay)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def replaced(old: bytes, new: bytes) -> Change:
    """The body with one text in place of another, which must be there."""

    def change(status: int, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        assert old in body, body
        return status, body.replace(old, new), headers

    return change


def absent(status: int, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
    return 404, b"{}", headers
