"""What a running gateway says of itself, from its admin port."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from kvrelay.core.doctor.facts import RouterFacts, RouterWorkerFacts
from kvrelay.core.doctor.window import Window
from kvrelay.core.routing.status import WorkerStatus
from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.fleet.static import worker_headers
from kvrelay.edge.observe.readings import Readings, Span, read_page
from kvrelay.edge.observe.windows import window
from kvrelay.edge.system.clock import monotonic_s, wall_s

_WORST_FIRST = ("unusable", "incomplete", "approximate", "live")


class _Status(Struct):
    policy: str
    index_problem: str | None = None


class _Worker(Struct):
    name: str
    url: str
    routable: bool
    malformed_events: int = 0
    events_problem: str | None = None
    router: WorkerStatus | None = None


class _Workers(Struct):
    workers: list[_Worker]


class Gateway(Struct, frozen=True):
    facts: RouterFacts
    workers: Mapping[str, str]  # name -> URL
    window: Window | None = None  # its traffic; None: no page of metrics was to be had


async def look_at(
    session: aiohttp.ClientSession, url: str, token_file: Path | None, *, watch_s: float = 0.0
) -> Gateway:
    """Never raises for what the gateway does. `watch_s`: how long its traffic is watched; 0: all since it began."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        headers = worker_headers(token_file)  # a bearer token as well
        status = await ask.get_json(session, f"{url}/admin/status", headers, _Status)
        workers = (await ask.get_json(session, f"{url}/admin/workers", headers, _Workers)).workers
    except (WorkerUnreachable, WorkerAnswerUnusable, OSError) as error:
        return Gateway(RouterFacts(url=url, problem=f"{url}: {error}"), {})
    facts = RouterFacts(
        url=url,
        policy=status.policy,
        index_problem=status.index_problem,
        workers=tuple(_believed(worker) for worker in workers),
    )
    window = await _watched(session, url, headers, watch_s)
    return Gateway(facts, {worker.name: worker.url for worker in workers}, window)


async def _watched(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], watch_s: float
) -> Window | None:
    try:
        before = None
        if watch_s:
            before = await _reading(session, url, headers)
            await asyncio.sleep(watch_s)
        return window(Span(before, await _reading(session, url, headers)), now_s=wall_s())
    except (WorkerUnreachable, WorkerAnswerUnusable, ValueError):
        return None


async def _reading(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Readings:
    page = await ask.get(session, f"{url}/metrics", headers)
    return read_page(page.body.decode("utf-8", "replace"), monotonic_s())


def believed(workers: Iterable[Mapping[str, Any]]) -> tuple[RouterWorkerFacts, ...]:
    """Of entries of /admin/workers."""
    return tuple(_believed(msgspec.convert(worker, _Worker)) for worker in workers)


def _believed(worker: _Worker) -> RouterWorkerFacts:
    targets = () if worker.router is None else worker.router.targets
    states = [target.index_state.value for target in targets]
    drifts = [target.drift for target in targets if target.drift is not None]
    problems = [target.index_problem for target in targets if target.index_problem is not None]
    return RouterWorkerFacts(
        name=worker.name,
        routable=worker.routable,
        index_state=next((state for state in _WORST_FIRST if state in states), "unusable"),
        index_problem=worker.events_problem or next(iter(problems), None),
        compared=sum(drift.compared for drift in drifts),
        over_claims=sum(drift.over_claim for drift in drifts),
        under_claims=sum(drift.under_claim for drift in drifts),
        resyncs=sum(drift.resyncs for drift in drifts),
        orphan_blocks=sum(target.orphan_blocks for target in targets),
        malformed_events=worker.malformed_events,
    )
