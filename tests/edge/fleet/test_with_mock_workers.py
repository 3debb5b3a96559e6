"""Fleet, router and real mock worker processes together: coming late, and a worker's death and return."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvrelay.core.model.effects import RequestReplay
from kvrelay.core.model.events import Event
from kvrelay.core.model.units import IndexState
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.core.routing.status import WorkerStatus
from kvrelay.edge.fleet.static import Fleet
from kvrelay.edge.system.config import WorkerConfig, load_config
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec

PROMPT = list(range(1000, 1200))
BLOCKS = len(PROMPT) // 16


def complete(worker: RunningWorker) -> None:
    body = json.dumps({"model": worker.spec.model, "prompt": PROMPT, "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{worker.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.status == 200


class Watching:
    def __init__(self, router: Router, fed: list[Event]) -> None:
        self.router = router
        self.fed = fed

    @property
    def worker(self) -> WorkerStatus:
        return self.router.status(time.monotonic()).workers[0]

    @property
    def blocks(self) -> int:
        return self.worker.targets[0].index_blocks["gpu"]

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not (self.router.status(0.0).workers and condition()):
            assert time.monotonic() < deadline, self.router.status(0.0)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(worker: RunningWorker) -> AsyncIterator[Watching]:
    router = Router(RouterSettings(key_seed=b"k"))
    fed: list[Event] = []

    def feed(event: Event) -> None:
        fed.append(event)
        for effect in router.step(time.monotonic(), event):
            if isinstance(effect, RequestReplay):
                fleet.replay(effect)

    config = load_config(env={"KVRELAY_HEALTH__INTERVAL_S": "0.1"})
    config = config.model_copy(update={"workers": (WorkerConfig(url=worker.url, name="a"),)})
    fleet = Fleet(config, feed=feed, clock=time.monotonic)
    await fleet.start()
    try:
        yield Watching(router, fed)
    finally:
        await fleet.stop()


@pytest.mark.covers("RT-22", "S03", "MK-04")
async def test_history_is_replayed_to_a_late_gateway_and_forgotten_with_the_process() -> None:
    async with MockFleet([MockSpec(name="a")]) as mocks:
        await asyncio.to_thread(complete, mocks.workers[0])
        async with watching(mocks.workers[0]) as watch:
            await watch.until(lambda: watch.blocks == BLOCKS)
            first = watch.worker
            assert first.targets[0].index_state is IndexState.LIVE
            assert (first.engine, first.incarnation) == ("mock", mocks.workers[0].incarnation)

            await asyncio.to_thread(mocks.kill, "a")
            await watch.until(lambda: not watch.worker.up)
            await asyncio.to_thread(mocks.restart, "a")
            await watch.until(lambda: watch.worker.incarnation != first.incarnation)
            assert watch.blocks == 0
            await watch.until(lambda: watch.worker.up)
            await asyncio.to_thread(complete, mocks.workers[0])
            await watch.until(lambda: watch.blocks == BLOCKS)
            assert watch.worker.incarnation == mocks.workers[0].incarnation
