"""What seeing costs: one hour of traffic at 500 requests a second, through the real metrics and the real live page.

The hour passes in virtual time: receipts of a gateway's own are counted one after the other, the page is scraped every
15 s in the format that Prometheus asks for, and two browsers watch the live page. Beside it stands what the gateway's
relaying costs for the same requests, measured in this run on one core. A request streams `CHUNKS` chunks, which is
short for an answer: longer ones cost the gateway more and the counting hardly.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec.structs import replace

from bench.figure import Figure
from bench.gateway import drive_all, serve_arguments, wait_routable
from bench.rig.load import post
from bench.rig.processes import cores, pinned
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.gateway.admin import Admin
from kvrelay.edge.gateway.auth import AdminToken
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.gateway.live_source import GatewaySource
from kvrelay.edge.observe.readings import Readings
from kvrelay.edge.observe.ui.app import Ui
from kvrelay.edge.observe.ui.stream import Stream
from kvrelay.edge.system.config import load_config

HOUR_S, PER_S, SCRAPE_S = 3600, 500, 15
SESSIONS, TURNS = 600, 40  # open at once; of each before it ends
CHUNKS, RELAYED, WARM_UP, CONNECTIONS = 32, 4000, 500, 32
WATCHERS = 2
LIMIT_PERCENT = 5.0
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
_WATCH = "import sys, urllib.request\nwith urllib.request.urlopen(sys.argv[1]) as s:\n    while s.read1(1 << 16): pass"


def run() -> list[Figure]:
    gateway_core, other_core = cores()
    kept = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {other_core})
    upstream = ["-m", "bench.rig.upstream", "--stream-chunks", str(CHUNKS), "--chunk-ms", "0"]
    try:
        with pinned(upstream, core=other_core) as workers:
            relay_us, receipt = _relayed(workers.ready, gateway_core)
            os.sched_setaffinity(0, {gateway_core})
            hour = asyncio.run(_Hour(receipt).run(workers.ready))
    finally:
        os.sched_setaffinity(0, kept)
    relay_s = relay_us / 1e6 * HOUR_S * PER_S
    name = f"{CHUNKS} chunks"
    return [
        Figure(f"gateway CPU per streamed request, {name}", relay_us, "us"),
        Figure("  counting a receipt", hour.counting_s / (HOUR_S * PER_S) * 1e6, "us"),
        Figure("  one scrape", hour.scrapes_s / (HOUR_S / SCRAPE_S) * 1e3, "ms"),
        Figure("  one picture of the live page, to two watchers", hour.pictures_s / hour.pictures * 1e3, "ms"),
        Figure("an hour's metrics and live page, of gateway CPU", 100 * hour.total_s / relay_s, "%", LIMIT_PERCENT),
        Figure("series more after the hour than after its first minute", hour.series_grown, "", 0.0),
    ]


def _relayed(worker_urls: Sequence[str], gateway_core: int) -> tuple[float, Receipt]:
    """CPU per request, what counting costs in it included, and one of the receipts."""
    with pinned(serve_arguments(worker_urls, "cache_load"), core=gateway_core) as gateway:
        admin_url = gateway.ready["admin_url"]
        wait_routable(admin_url, len(worker_urls))
        drive_all(gateway.ready["url"], _streams(WARM_UP), connections=CONNECTIONS)
        began_s = gateway.cpu_s()
        drive_all(gateway.ready["url"], _streams(RELAYED), connections=CONNECTIONS)
        return (gateway.cpu_s() - began_s) / RELAYED * 1e6, _receipt(admin_url)


def _streams(count: int) -> Iterator[bytes]:
    for number in range(count):
        body = {"model": "m", "prompt": [number % 64, *range(189)], "stream": True}
        yield post("/v1/completions", msgspec.json.encode(body))


def _receipt(admin_url: str) -> Receipt:
    with urllib.request.urlopen(f"{admin_url}/admin/receipts?limit=1") as answer:
        return msgspec.convert(msgspec.json.decode(answer.read())["receipts"][0], Receipt)


class _Hour:
    """Feeds an idle gateway's metrics and log; the live page's own stream paints, once per virtual second."""

    def __init__(self, receipt: Receipt) -> None:
        self.counting_s = self.scrapes_s = self.pictures_s = 0.0
        self.pictures = 0
        self.series_grown = 0.0
        self._receipt = receipt
        self._series_at_first = 0

    @property
    def total_s(self) -> float:
        return self.counting_s + self.scrapes_s + self.pictures_s

    async def run(self, worker_urls: Sequence[str]) -> _Hour:
        settings: dict[str, object] = {
            "gateway.port": 0,
            "gateway.admin_port": 0,
            "workers": [{"url": url} for url in worker_urls],
        }
        async with Gateway(load_config(Path("/dev/null"), {}, settings)) as gateway, AsyncExitStack() as around:
            admin = Admin(gateway, AdminToken(None))
            ui = Ui(GatewaySource(gateway, admin.status_value, admin.workers_value), tick_s=HOUR_S)
            url = await around.enter_async_context(_served(ui))
            for _ in range(WATCHERS):
                watcher = await asyncio.create_subprocess_exec(sys.executable, "-c", _WATCH, url)
                around.push_async_callback(watcher.wait)
                around.callback(watcher.kill)
            while ui.stream.watchers < WATCHERS or len(gateway.status().workers) < len(worker_urls):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await self._pass(gateway, ui.stream)
        return self

    async def _pass(self, gateway: Gateway, page: Stream) -> None:
        count = gateway.metrics.observe_receipt
        for second in range(HOUR_S):
            made = list(self._of_second(second))
            began_s = time.process_time()
            for receipt in made:
                count(receipt)
            self.counting_s += time.process_time() - began_s
            for receipt in made[-20:]:  # the log is no part of this; the page shows its last ones
                gateway.receipts.write(receipt)
            if second % SCRAPE_S == 0:
                began_s = time.process_time()
                gateway.metrics.render_for(OPENMETRICS)
                self.scrapes_s += time.process_time() - began_s
            began_s = time.process_time()
            await page.tick()
            await asyncio.sleep(0)
            self.pictures_s += time.process_time() - began_s
            self.pictures += 1
            if second == 60:
                self._series_at_first = Readings(gateway.metrics.collect(), 0.0).series_count()
        self.series_grown = Readings(gateway.metrics.collect(), 0.0).series_count() - self._series_at_first

    def _of_second(self, second: int) -> Iterator[Receipt]:
        for number in range(PER_S):
            turn = second * PER_S + number
            session = f"s{turn % SESSIONS}-{turn // SESSIONS // TURNS}"
            ttft_ms = 20.0 + turn % 300
            yield replace(
                self._receipt, request_id=f"r{turn}", session_id=session, arrived_ms=second * 1e3, ttft_ms=ttft_ms
            )


@asynccontextmanager
async def _served(ui: Ui) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes(ui.routes())
    app.on_shutdown.append(ui.close)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/ui/stream"
    finally:
        await runner.cleanup()
