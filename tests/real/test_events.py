"""Lost events and evictions of real vLLM workers: whatever was lost on the way, the index is what the engine holds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import pytest

from kvrelay.core.model.units import IndexState
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.agent.host import AgentHost
from kvrelay.edge.system.config import WorkerConfig
from kvrelay.edge.system.ports import spare_port
from tests.edge.fleet.lossy import Watched, behind_proxy, fresh_truth, watching
from tests.real.engine import BLOCK_SIZE, MODEL_NAME, EngineUnavailable, VllmWorker, installed, prefill

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

Pair = tuple[VllmWorker, VllmWorker]

PROMPT_TOKENS = 8 * BLOCK_SIZE + 4
HIT_TOKENS = 8 * BLOCK_SIZE
CAUGHT_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmWorker]:
    """A worker with room for four prompts."""
    try:
        worker = VllmWorker(
            installed(), "small", port=spare_port(), cpu=0, folder=tmp_path_factory.mktemp("small"), blocks=40
        )
        worker.start()
        try:
            worker.wait_until_up()
            yield worker
        finally:
            worker.kill()
    except EngineUnavailable as reason:
        pytest.fail(f"the real engine cannot run here: {reason}", pytrace=False)


class Prompts:
    """New ones at every call, whatever the tests before have sent."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def some(self, count: int) -> list[list[int]]:
        return [[self._chance.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def complete(url: str, *prompts: list[int]) -> None:
    """One token each: one batch of events per prompt."""
    for prompt in prompts:
        await asyncio.to_thread(prefill, url, prompt)


async def claimed(watch: Watched, *prompts: list[int]) -> list[int]:
    return [await watch.matched_of({"model": MODEL_NAME, "prompt": prompt}) for prompt in prompts]


async def until_claimed(watch: Watched, prompt: list[int]) -> None:
    """The last event of what went before has arrived."""
    deadline = time.monotonic() + 30
    while await claimed(watch, prompt) != [HIT_TOKENS]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def until_subscribed(watch: Watched, url: str, new: Prompts) -> None:
    """Without a replay nothing tells when the subscription has come about; until then events go by unheard."""
    deadline = time.monotonic() + 60
    while not (watch.gateway.status().workers and watch.target().index_blocks["gpu"]):
        assert time.monotonic() < deadline
        await complete(url, *new.some(1))
        await asyncio.sleep(0.2)


async def next_seq(watch: Watched) -> int:
    """Once the index has everything that was published so far."""
    await watch.until_live()
    seq = watch.target().next_event_seq
    assert seq is not None
    return seq


async def receipts(watch: Watched, count: int) -> list[Receipt]:
    """The last ones, in the order of their requests."""
    await watch.until(lambda: len(watch.gateway.receipts.recent(count)) == count and not watch.gateway.host.requests)
    return list(watch.gateway.receipts.recent(count))[::-1]


@pytest.mark.covers("DR-06", "TP-01")
async def test_a_dropped_batch_is_replayed_by_the_engine(workers: Pair) -> None:
    worker, prompts = workers[0], Prompts(11).some(3)
    async with behind_proxy(worker) as (watch, proxy):
        seq = await next_seq(watch)
        proxy.do(f"drop {seq + 1}")
        await complete(worker.url, *prompts)
        await watch.until(lambda: watch.target().next_event_seq == seq + 3)
        assert proxy.seqs("drop") == [seq + 1] and watch.reports()["event_gap"] == 1
        assert await claimed(watch, *prompts) == [HIT_TOKENS] * 3
        assert watch.census() == await fresh_truth(worker)


@pytest.mark.covers("DR-06", "DR-08")
async def test_without_replay_what_was_known_is_dropped_and_rebuilt_from_what_follows(workers: Pair) -> None:
    worker, new = workers[0], Prompts(12)
    prompts = new.some(4)
    async with behind_proxy(worker, replay=False) as (watch, proxy):
        await until_subscribed(watch, worker.url, new)
        await complete(worker.url, prompts[0])
        await until_claimed(watch, prompts[0])
        seq = watch.target().next_event_seq
        assert seq is not None
        proxy.do(f"drop {seq}")
        await complete(worker.url, *prompts[1:])
        await watch.until(lambda: watch.target().next_event_seq == seq + 3)
        assert watch.target().index_state is IndexState.INCOMPLETE
        assert await claimed(watch, *prompts) == [0, 0, HIT_TOKENS, HIT_TOKENS]


@pytest.mark.covers("DR-07")
async def test_a_dropped_tail_is_caught_by_the_agents_heartbeat(workers: Pair) -> None:
    worker, prompts = workers[0], Prompts(13).some(1)
    async with (
        AgentHost(WorkerConfig(url=worker.url)) as agent,
        behind_proxy(worker, agent=agent) as (watch, proxy),
    ):
        seq = await next_seq(watch)
        proxy.do("drop tail")
        await complete(worker.url, *prompts)
        lost_at = time.monotonic()
        await watch.until(lambda: watch.target().next_event_seq == seq + 1, within_s=CAUGHT_WITHIN_S)
        assert time.monotonic() - lost_at < CAUGHT_WITHIN_S
        assert proxy.withheld() == 1 and watch.reports()["event_tail_lost"] == 1
        assert await claimed(watch, *prompts) == [HIT_TOKENS]
        assert watch.census() == await fresh_truth(worker)


@pytest.mark.covers("S17", "DR-05")
async def test_a_restarted_router_knows_old_prefixes_from_the_agent_alone(workers: Pair) -> None:
    worker, (old, meanwhile) = workers[0], Prompts(14).some(2)
    config = WorkerConfig(url=worker.url, name="a", replay="none")
    async with AgentHost(WorkerConfig(url=worker.url)) as agent:
        config = config.model_copy(update={"agent": agent.endpoint})
        async with watching(config) as before:
            await before.until_live()
            await complete(before.gateway.url, old)
        await complete(worker.url, meanwhile)
        async with watching(config) as after:
            await after.until_live()
            assert await claimed(after, old, meanwhile) == [HIT_TOKENS] * 2
            await complete(after.gateway.url, old, meanwhile)
            for receipt in await receipts(after, 2):
                assert receipt.matched_tokens_at_route == receipt.actual_cached_tokens == HIT_TOKENS
            assert after.census() == await fresh_truth(worker)


@pytest.mark.covers("S07", "S10")
async def test_evictions_are_followed_and_so_are_the_claims(small: VllmWorker) -> None:
    prompts = Prompts(15).some(12)
    async with (
        AgentHost(WorkerConfig(url=small.url)) as agent,
        watching(WorkerConfig(url=small.url, name="a", agent=agent.endpoint)) as watch,
    ):
        await watch.until_live()
        await complete(watch.gateway.url, *prompts)
        await until_claimed(watch, prompts[-1])
        await watch.until(lambda: watch.census() == agent.agent.ranks()[0].census)
        removed = watch.gateway.status().workers[0].events["removed"]
        assert removed >= 12 * 8 - 39 and watch.target().index_blocks["gpu"] <= 39
        await complete(watch.gateway.url, prompts[-1], prompts[0], prompts[-2], prompts[1])
        again = await receipts(watch, 4)
        assert [r.actual_cached_tokens for r in again] == [HIT_TOKENS, 0, HIT_TOKENS, 0]
        assert [r.matched_tokens_at_route for r in again] == [HIT_TOKENS, 0, HIT_TOKENS, 0]
        assert watch.census() == await fresh_truth(small)


@pytest.mark.covers("S17", "DR-05")
async def test_a_snapshot_tells_a_late_router_what_is_left_after_evictions(small: VllmWorker) -> None:
    prompts = Prompts(16).some(8)
    async with AgentHost(WorkerConfig(url=small.url)) as agent:
        await complete(small.url, *prompts)
        config = WorkerConfig(url=small.url, name="a", replay="none", agent=agent.endpoint)
        async with watching(config) as watch:
            await watch.until_live()
            await until_claimed(watch, prompts[-1])
            await watch.until(lambda: watch.census() == agent.agent.ranks()[0].census)
            assert watch.reports()["snapshot_restored"] == 1
            assert await claimed(watch, prompts[-1], prompts[0]) == [HIT_TOKENS, 0]
            assert watch.census() == await fresh_truth(small)
