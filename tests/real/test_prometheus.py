"""A real Prometheus scrapes a run of the gateway: every panel gets data, and its totals are those of the receipts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.observe.alerts import ALERTS
from kvrelay.edge.observe.dashboard import dashboard
from kvrelay.edge.observe.files import rules_yaml
from kvrelay.edge.observe.metrics_join import compare
from kvrelay.edge.observe.receipt_file import read_receipts
from kvrelay.edge.system.config import load_config
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.scripted import until
from tests.edge.stores.test_tiered import KEYS, NAMESPACE, keep_all, load_all, open_tiers
from tests.real.prometheus import Prometheus, scraping

pytestmark = pytest.mark.real

RUN_S = 34.0
WINDOWS = {"$__rate_interval": "10s", "$__range_s": "30", "$__range": "30s", "$worker": ".*"}
SESSIONS, TURNS, PROMPT_TOKENS = 6, 3, 400


def as_sent(expression: str) -> str:
    """What Grafana makes of it."""
    for variable, value in WINDOWS.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


QUERIES = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


async def traffic(gateway: Gateway, ended: asyncio.Event) -> None:
    """Sessions whose turns grow, each of a text of its own, so about half of the prompts are new."""
    async with aiohttp.ClientSession(gateway.url) as client:
        number = 0
        while not ended.is_set():
            number += SESSIONS
            await asyncio.gather(*(session(client, number + one) for one in range(SESSIONS)), impatient(client))


async def impatient(client: aiohttp.ClientSession) -> None:
    """Leaves before the answer is whole."""
    answer = await client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 500, "stream": True})
    await answer.content.readany()
    answer.close()


async def session(client: aiohttp.ClientSession, number: int, tokens: int = 6) -> None:
    prompt = [(number * 7919 + at) % 50_000 for at in range(PROMPT_TOKENS)]
    for turn in range(TURNS):
        body = {"prompt": prompt + [9] * 16 * turn, "max_tokens": tokens, "stream": True}
        headers = {"x-session-id": f"s{number}"}
        with contextlib.suppress(aiohttp.ClientPayloadError):  # cut off when its worker was lost
            async with client.post("/v1/completions", json=body, headers=headers) as answer:
                await answer.read()


async def watched(server: Prometheus, answered: dict[str, bool], ended: asyncio.Event) -> None:
    while not ended.is_set():
        for expression in (one for one, seen in answered.items() if not seen):
            answered[expression] = bool(await asyncio.to_thread(server.query, as_sent(expression)))
        await asyncio.sleep(1)


@pytest.mark.covers("OB-01", "OB-02", "OB-03", "OB-04", "OB-05", "OB-07", "OB-08", "OB-14", "TP-12", "RC-18")
@pytest.mark.timeout(170)
async def test_every_panel_gets_data_from_a_real_prometheus_and_its_totals_are_the_receipts(tmp_path: Path) -> None:
    specs = [MockSpec(name=name, blocks=400, prefill_tokens_per_s=4000.0, decode_ms=2.0) for name in ("a", "b", "c")]
    receipts = tmp_path / "receipts.jsonl"
    async with MockFleet(specs) as fleet, busy_store(tmp_path / "store") as store_url:
        settings: dict[str, object] = {
            "workers": [{"name": one.spec.name, "url": one.url, "gpus": 8} for one in fleet.workers],
            "gateway.port": 0,
            "gateway.admin_port": 0,
            "health.interval_s": 0.5,
            "observe.task_idle_s": 2.0,
            "observe.gpu_hour_price": 2.5,
            "receipts.path": str(receipts),
        }
        async with Gateway(load_config(Path("/dev/null"), {}, settings), seed=1) as gateway:
            await until(lambda: sum(worker.routable for worker in gateway.status().workers) == len(specs))
            with scraping([gateway.admin_url, store_url], tmp_path, rules_yaml()) as server:
                answered = dict.fromkeys(QUERIES, False)
                await run(fleet, gateway, server, answered)
                receipts_agree(server, gateway, receipts)
                exemplars = server.exemplars("kvrelay_ttft_seconds_bucket")
                assert exemplars and all("request_id" in e["labels"] for one in exemplars for e in one["exemplars"])
                assert server.problems() == []
    silent = [expression for expression, seen in answered.items() if not seen]
    assert silent == [], "\n".join(silent)


@asynccontextmanager
async def busy_store(folder: Path) -> AsyncIterator[str]:
    """A tiered store that is written and read all the time, with a page for its numbers as an engine's process has."""
    disk = {"url": f"file://{folder}", "bytes": 10_000_000, "index": True}
    store = open_tiers({"url": "memory://", "bytes": 40_000}, disk)

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="\n".join(store.metrics()) + "\n")

    async def use() -> None:
        while True:
            await asyncio.to_thread(keep_all, store)
            await asyncio.to_thread(load_all, store)
            await asyncio.to_thread(store.delete, NAMESPACE, KEYS)
            await asyncio.sleep(0.3)

    app = web.Application()
    app.add_routes([web.get("/metrics", page)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    using = asyncio.ensure_future(use())
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        using.cancel()
        await asyncio.gather(using, return_exceptions=True)
        await runner.cleanup()
        await asyncio.to_thread(store.close)


async def run(fleet: MockFleet, gateway: Gateway, server: Prometheus, answered: dict[str, bool]) -> None:
    """With a pause at its end, in which there are too few values, and the loss of a worker on the way."""
    ended, watching = asyncio.Event(), asyncio.Event()
    watcher = asyncio.ensure_future(watched(server, answered, watching))
    load = asyncio.ensure_future(traffic(gateway, ended))
    await asyncio.sleep(RUN_S / 2)
    fleet.workers[2].process.kill()
    await asyncio.sleep(RUN_S / 2)
    ended.set()
    await load
    await asyncio.sleep(9)
    async with aiohttp.ClientSession(gateway.url) as client:
        await session(client, 1_000_000, tokens=2)
    await asyncio.sleep(6)
    watching.set()
    await watcher


def receipts_agree(server: Prometheus, gateway: Gateway, receipts: Path) -> None:
    gateway.receipts.flush()
    written = list(read_receipts(receipts))
    names = [comparison.metric for comparison in compare(written, {})]
    totals = {name: server.value(f"sum({name})") for name in names if server.query(name)}
    verdicts = {comparison.metric: comparison.verdict for comparison in compare(written, totals)}
    assert set(verdicts.values()) == {"pass"}, (verdicts, totals)
    assert len(written) > 100


def test_every_query_and_alert_is_promql_even_where_nobody_can_answer_yet(tmp_path: Path) -> None:
    with scraping(["http://127.0.0.1:9"], tmp_path, rules_yaml()) as server:
        for expression in (*map(as_sent, QUERIES), *(alert.expression for alert in ALERTS)):
            try:
                server.query(expression)
            except urllib.error.HTTPError as problem:
                pytest.fail(f"{expression}: {json.load(problem)['error']}")
