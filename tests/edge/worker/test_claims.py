"""The mock's events, the vLLM decoder and the router's index, written apart, must agree: claimed equals actual at rest.

A worker with few blocks serves random prompts of a few families, so it shares, stores twice and evicts. Before every
request the router is asked what the worker holds; afterwards the engine says what it really hit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count

import numpy as np
import pytest

from kvrelay.core.model.effects import RequestReplay
from kvrelay.core.model.events import Event, RequestArrived
from kvrelay.core.model.prompt import Prompt
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.edge.fleet.static import Fleet
from kvrelay.edge.system.config import WorkerConfig, load_config
from kvrelay.edge.worker.launch import RunningWorker
from tests.edge.worker.conftest import Client

BLOCK_SIZE = 16


@asynccontextmanager
async def watched(worker: RunningWorker) -> AsyncIterator[Router]:
    """A router that is fed by a real fleet watching one worker."""
    router = Router(RouterSettings(affinity_ttl_s=None))

    def feed(event: Event) -> None:
        for effect in router.step(time.monotonic(), event):
            if isinstance(effect, RequestReplay):
                fleet.replay(effect)

    fleet = Fleet(load_config(env={}), feed=feed, clock=time.monotonic)
    await fleet.start()
    try:
        await fleet.add(WorkerConfig(url=worker.url, name="own"))
        yield router
    finally:
        await fleet.stop()


async def settle(router: Router, client: Client, nudge: Iterator[int]) -> None:
    """Wait until the router has applied every batch. A lost last batch leaves no gap to see: let another one follow."""
    async with asyncio.timeout(20):
        while True:
            next_seq = client.state()["next_seq"]
            for _ in range(40):
                if applied_seq(router) == next_seq:
                    return
                await asyncio.sleep(0.005)
            await asyncio.to_thread(client.complete, prompt=[next(nudge)] * 17, max_tokens=1)


def applied_seq(router: Router) -> int | None:
    workers = router.status(time.monotonic()).workers
    if not workers or not workers[0].targets:
        return None
    return workers[0].targets[0].next_event_seq or 0


def claimed_tokens(router: Router, prompt: list[int]) -> int:
    tokens = np.array(prompt, dtype=np.uint32)
    keys = {size: router.keyer.prompt_keys(tokens, size) for size in router.block_sizes()}
    arrived = RequestArrived(request_id="ask", prompt=Prompt(prompt_tokens=len(prompt), keys=keys))
    (candidate,) = router.match(time.monotonic(), arrived).candidates
    return candidate.matched_tokens


@pytest.mark.covers("S10", "RT-14")
@pytest.mark.parametrize("dropped_batches", [0, 3])
async def test_claimed_equals_actual_under_sharing_and_eviction(
    start: Callable[..., RunningWorker], dropped_batches: int
) -> None:
    worker = start(blocks=40, prefill_tokens_per_s=1e6, decode_ms=0.2, block_size_tokens=BLOCK_SIZE)
    client = Client(worker.url)
    chance = np.random.default_rng(7)
    nudge = count(100_000)
    hit_tokens = 0
    async with watched(worker) as router:
        await settle(router, client, nudge)
        if dropped_batches:
            client.fault(kind="drop_event", count=dropped_batches, probability=0.2)
        for _ in range(60):
            family, prompt_tokens = int(chance.integers(4)), int(chance.integers(2, 300))
            prompt = [1000 * family + i for i in range(prompt_tokens)]
            await settle(router, client, nudge)
            claimed = claimed_tokens(router, prompt)
            body = await asyncio.to_thread(client.complete, prompt=prompt, max_tokens=int(chance.integers(1, 20)))
            actual = body.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert actual == min(claimed, (prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)
            hit_tokens += actual
        assert hit_tokens > 1000
        assert client.state()["counters"]["event_batches_withheld"] == dropped_batches
