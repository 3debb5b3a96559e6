"""The engines' own counters around an arm: their pages are kept as they were, what an arm added is derived from them.

The client's and the router's view of hits come from the answers; this one does not, so the three can be held against
each other, and an arm that started on warm caches cannot hide it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import aiohttp
from msgspec import Struct

from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import WorkerUnreachable
from kvrelay.edge.connectors.metrics_page import increase, whole
from kvrelay.edge.connectors.registry import CONNECTORS
from kvrelay.edge.system.urls import join_url

WATCH_S = 0.25
_PREEMPTIONS = re.compile(r"^\w+:num_preemptions(?:_total)?(?:\{.*\})?\s+(\S+)", re.MULTILINE)
_MISUSED = re.compile(r"^kvrelay_mock_wrong_reuse_blocks_total\s+(\S+)", re.MULTILINE)


class Asked(Protocol):
    """A worker whose page is read."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class Reading(Struct, frozen=True):
    """One page in our words; None where it does not say. `page` is empty when there is none."""

    page: str
    queries_tokens: int | None = None
    hits_tokens: int | None = None
    kv_usage_ratio: float | None = None
    preemptions: int | None = None
    wrong_reuse_blocks: int | None = None  # only mock workers can know


class Counted(Struct, frozen=True):
    """What an arm added on one worker, and the peak of what was in use meanwhile."""

    queries_tokens: int | None
    hits_tokens: int | None
    preemptions: int | None
    wrong_reuse_blocks: int | None
    kv_usage_peak_ratio: float | None


async def read_all(workers: Sequence[Asked], *, timeout_s: float = 5.0) -> dict[str, Reading]:
    """By name. A worker that cannot be asked has an empty page."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        readings = await asyncio.gather(*(_read(session, worker) for worker in workers))
    return {worker.name: reading for worker, reading in zip(workers, readings, strict=True)}


def save_pages(folder: Path, readings: Mapping[str, Reading]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, reading in readings.items():
        (folder / f"{name}.prom").write_text(reading.page, encoding="utf-8")


def added(before: Reading, after: Reading, peak: float | None) -> Counted:
    return Counted(
        queries_tokens=increase(before.queries_tokens, after.queries_tokens),
        hits_tokens=increase(before.hits_tokens, after.hits_tokens),
        preemptions=increase(before.preemptions, after.preemptions),
        wrong_reuse_blocks=increase(before.wrong_reuse_blocks, after.wrong_reuse_blocks),
        kv_usage_peak_ratio=peak,
    )


class UsageWatch:
    """Looks at the workers' KV usage while an arm runs; `peaks` is by worker, without those that do not report it."""

    def __init__(self, workers: Sequence[Asked]) -> None:
        self._workers = workers
        self._task: asyncio.Task[None] | None = None
        self.peaks: dict[str, float] = {}

    async def __aenter__(self) -> UsageWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            for name, reading in (await read_all(self._workers)).items():
                if reading.kv_usage_ratio is not None:
                    self.peaks[name] = max(self.peaks.get(name, 0.0), reading.kv_usage_ratio)
            await asyncio.sleep(WATCH_S)


async def _read(session: aiohttp.ClientSession, worker: Asked) -> Reading:
    try:
        answer = await ask.get(session, join_url(worker.url, "/metrics"), worker.headers)
    except WorkerUnreachable:
        return Reading("")
    return reading_of(worker.engine, answer.body.decode("utf-8", "replace") if answer.status == 200 else "")


def reading_of(engine: str, text: str) -> Reading:
    page = CONNECTORS[engine].metrics.read(text)
    usages = [load.kv_usage_ratio for load in page.loads().values() if load.kv_usage_ratio is not None]
    return Reading(
        page=text,
        queries_tokens=whole(page.sum("prefix_queries_tokens")),
        hits_tokens=whole(page.sum("prefix_hits_tokens")),
        kv_usage_ratio=max(usages, default=None),
        preemptions=_sum(_PREEMPTIONS, text),
        wrong_reuse_blocks=_sum(_MISUSED, text),
    )


def _sum(line: re.Pattern[str], text: str) -> int | None:
    values = [float(found[1]) for found in line.finditer(text)]
    return round(sum(values)) if values else None
