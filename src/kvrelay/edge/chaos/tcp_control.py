"""The control port of a TCP proxy: GET / answers its state, POST / takes instructions as text."""

from __future__ import annotations

from aiohttp import web

from kvrelay.edge.chaos.tcp import TcpProxy
from kvrelay.edge.chaos.words import ScriptError

MAX_SCRIPT_BYTES = 65_536


def control_of(proxy: TcpProxy) -> web.Application:
    """A page of another site must not be able to give orders: browsers say where they come from, and are refused."""

    async def show(request: web.Request) -> web.Response:
        return web.json_response(proxy.state())

    async def obey(request: web.Request) -> web.Response:
        if "origin" in request.headers:
            raise web.HTTPForbidden(text="not from a browser\n")
        try:
            proxy.do(await request.text())
        except ScriptError as problem:
            return web.json_response({"error": str(problem)}, status=400)
        return web.json_response(proxy.state())

    app = web.Application(client_max_size=MAX_SCRIPT_BYTES)
    app.add_routes([web.get("/", show), web.post("/", obey)])
    return app


async def serve_control(proxy: TcpProxy, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Who started it cleans the runner up. Answers the port that was taken; OSError if it cannot listen."""
    runner = web.AppRunner(control_of(proxy), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, runner.addresses[0][1]
