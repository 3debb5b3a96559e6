"""Lost events, with real mock worker processes, the event proxy and the agent: afterwards the index is the truth."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator

import aiohttp
import pytest

from kvrelay.core.model.units import IndexState
from kvrelay.edge.agent.host import AgentHost
from kvrelay.edge.system.config import WorkerConfig
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.fleet.lossy import BLOCKS, SIZE, behind_proxy, complete, fresh_truth, watching

CAUGHT_WITHIN_S = 10.0  # a lost tail, by the agent's heartbeat


@pytest.fixture
async def worker() -> AsyncIterator[RunningWorker]:
    async with MockFleet([MockSpec(name="a")]) as mocks:
        yield mocks.workers[0]


@pytest.fixture
async def forgetful() -> AsyncIterator[RunningWorker]:
    """Its replay buffer is much smaller than its history, and so is its cache."""
    async with MockFleet([MockSpec(name="a", replay_buffer_batches=2, blocks=100)]) as mocks:
        yield mocks.workers[0]


@pytest.mark.covers("DR-06")
async def test_a_dropped_event_is_replayed_and_the_index_equals_a_fresh_truth(worker: RunningWorker) -> None:
    async with behind_proxy(worker) as (watch, proxy):
        await complete(worker.url, 1)
        await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
        proxy.do("drop 1")
        await complete(worker.url, 2, 3)
        await watch.until(lambda: watch.target().index_blocks["gpu"] == 3 * BLOCKS)
        assert watch.target().index_state is IndexState.LIVE
        assert proxy.seqs("drop") == [1] and watch.reports()["event_gap"] == 1
        assert watch.census() == await fresh_truth(worker)
        assert await watch.matched(2) == BLOCKS * SIZE


@pytest.mark.covers("DR-06", "DR-08", "S17")
async def test_without_replay_a_gap_empties_the_index_and_it_is_rebuilt_from_what_follows(
    worker: RunningWorker,
) -> None:
    async with behind_proxy(worker, replay=False) as (watch, proxy):
        await complete(worker.url, 1)
        await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
        proxy.do("drop 1")
        await complete(worker.url, 2, 3)
        await watch.until(lambda: watch.reports().get("event_gap_lost"))
        await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
        assert watch.target().index_state is IndexState.INCOMPLETE
        assert [await watch.matched(n) for n in (1, 2, 3)] == [0, 0, BLOCKS * SIZE], "the old ones are not believed"


@pytest.mark.covers("DR-07")
@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no-replay"])
async def test_a_dropped_tail_is_caught_by_the_agents_heartbeat(worker: RunningWorker, replay: bool) -> None:
    async with (
        AgentHost(WorkerConfig(url=worker.url)) as agent,
        behind_proxy(worker, replay=replay, agent=agent) as (watch, proxy),
    ):
        await watch.until_live()
        await complete(worker.url, 1)
        await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
        proxy.do("drop tail")
        await complete(worker.url, 2)
        lost_at = time.monotonic()
        await watch.until(lambda: watch.target().index_blocks["gpu"] == 2 * BLOCKS, within_s=CAUGHT_WITHIN_S)
        assert time.monotonic() - lost_at < CAUGHT_WITHIN_S
        assert proxy.withheld() == 1 and watch.reports()["event_tail_lost"] == 1
        assert watch.target().index_state is IndexState.LIVE
        assert watch.census() == await fresh_truth(worker)


@pytest.mark.covers("DR-07")
async def test_a_tail_that_the_engine_itself_did_not_send_is_caught_as_well(worker: RunningWorker) -> None:
    async with AgentHost(WorkerConfig(url=worker.url)) as agent:
        config = WorkerConfig(url=worker.url, name="a", replay="none", agent=agent.endpoint)
        async with watching(config) as watch:
            await watch.until_live()
            await complete(worker.url, 1)
            await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
            await _post(f"{worker.url}/mock/faults", {"kind": "drop_event"})
            await complete(worker.url, 2)
            await watch.until(lambda: watch.target().index_blocks["gpu"] == 2 * BLOCKS, within_s=CAUGHT_WITHIN_S)
            assert watch.reports()["event_tail_lost"] == 1


@pytest.mark.covers("DR-07")
async def test_a_dropped_tail_without_an_agent_stays_unseen_until_something_follows(worker: RunningWorker) -> None:
    async with behind_proxy(worker) as (watch, proxy):
        await complete(worker.url, 1)
        await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
        proxy.do("drop 1")
        await complete(worker.url, 2)
        await asyncio.sleep(3 * 0.2)
        assert watch.target().index_blocks["gpu"] == BLOCKS and "event_gap" not in watch.reports()
        await complete(worker.url, 3)
        await watch.until(lambda: watch.target().index_blocks["gpu"] == 3 * BLOCKS)


@pytest.mark.covers("S17", "DR-05")
async def test_a_gap_larger_than_the_replay_buffer_is_mended_by_the_agent(forgetful: RunningWorker) -> None:
    async with (
        AgentHost(WorkerConfig(url=forgetful.url)) as agent,
        behind_proxy(forgetful, agent=agent) as (watch, proxy),
    ):
        await watch.until_live()
        await complete(forgetful.url, 1)
        proxy.do("drop 1-12")
        await complete(forgetful.url, *range(2, 16))
        await watch.until(lambda: watch.reports().get("snapshot_restored"))
        await watch.until(lambda: watch.target().next_event_seq == 15)
        await watch.until(lambda: watch.census() == agent.agent.ranks()[0].census)
        assert watch.target().index_state is IndexState.LIVE and "event_gap_lost" not in watch.reports()
        assert await watch.matched(15) == BLOCKS * SIZE, "stored during the gap or after it"
        assert await watch.matched(1) == 0, "evicted during the gap"


@pytest.mark.covers("S17", "DR-05")
async def test_a_router_that_restarts_in_mid_traffic_knows_old_prefixes_from_the_agent(
    forgetful: RunningWorker,
) -> None:
    config = WorkerConfig(url=forgetful.url, name="a")
    async with AgentHost(config) as agent:
        config = config.model_copy(update={"agent": agent.endpoint})
        async with watching(config) as before:
            await before.until_live()
            await complete(before.gateway.url, 1, 2, 3, 4)
            await before.until(lambda: before.target().index_blocks["gpu"] == 4 * BLOCKS)
        await complete(forgetful.url, 5, 6)
        async with watching(config) as after:
            traffic = asyncio.create_task(complete(forgetful.url, 7, 8))
            await after.until_live()
            assert await after.matched(2) == BLOCKS * SIZE, "beyond what the replay buffer reaches"
            await traffic
            await after.until(lambda: after.census() == agent.agent.ranks()[0].census)
            await complete(after.gateway.url, 3)
            await after.until(lambda: after.gateway.receipts.recent(1))
            receipt = after.gateway.receipts.recent(1)[0]
            assert receipt.matched_tokens_at_route == receipt.actual_cached_tokens == BLOCKS * SIZE


@pytest.mark.covers("S17", "DR-05")
async def test_four_warm_workers_are_known_again_after_a_restart_as_far_as_each_can_tell() -> None:
    """Two replay, one only has an agent, and one has neither and can tell nothing of its past."""
    specs = [MockSpec(name=name, replay="none" if name in "cd" else "auto") for name in "abcd"]
    async with MockFleet(specs) as mocks:
        for n, worker in enumerate(mocks.workers):
            await complete(worker.url, n)
        plain = {w.name: WorkerConfig(url=w.url, name=w.name) for w in mocks.workers}
        async with AgentHost(plain["c"]) as agent:
            # the agent of a worker without replay has to be there from the start; here its past is one clear away
            while not any(rank.whole for rank in agent.agent.ranks()):  # it may not have subscribed yet
                await asyncio.to_thread(_reset, mocks.worker("c").url)
                await complete(mocks.worker("c").url, 2)
            workers = {**plain, "c": plain["c"].model_copy(update={"agent": agent.endpoint})}
            flowing = asyncio.create_task(complete(mocks.worker("a").url, *range(10, 30)))
            async with watching(*workers.values()) as watch:
                await watch.until(lambda: len(watch.gateway.status().workers) == 4, within_s=5)
                await watch.until(lambda: all(watch.target(n).index_state is IndexState.LIVE for n in "abc"))
                assert watch.target("d").index_state is IndexState.INCOMPLETE
                known = [await watch.matched(n, worker) for n, worker in enumerate("abcd")]
                assert known == [BLOCKS * SIZE] * 3 + [0]
                await flowing
                await complete(watch.gateway.url, 3)
                await watch.until(lambda: watch.gateway.receipts.recent(1))
                assert watch.gateway.receipts.recent(1)[0].status == "ok"


def _reset(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", b""), timeout=10) as answer:
        assert answer.status == 200


@pytest.mark.covers("RT-22", "DR-03")
async def test_a_new_life_of_the_worker_is_not_filled_with_the_old_ones_blocks() -> None:
    async with MockFleet([MockSpec(name="a")]) as mocks:
        config = WorkerConfig(url=mocks.workers[0].url, name="a")
        async with (
            AgentHost(config, interval_s=0.1) as agent,
            watching(config.model_copy(update={"agent": agent.endpoint})) as watch,
        ):
            await watch.until_live()
            await complete(mocks.workers[0].url, 1)
            await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
            await asyncio.to_thread(mocks.restart, "a")
            new = mocks.workers[0].incarnation
            await watch.until(lambda: watch.gateway.status().workers[0].incarnation == new)
            await watch.until_live()
            assert watch.target().index_blocks["gpu"] == 0
            await complete(mocks.workers[0].url, 2)
            await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
            await watch.until(lambda: agent.heartbeat().incarnation == new)
            await watch.until(lambda: watch.census() == agent.agent.ranks()[0].census)
            assert await watch.matched(1) == 0


@pytest.mark.covers("DR-08")
async def test_an_agent_serves_no_snapshot_of_a_worker_that_is_gone() -> None:
    async with MockFleet([MockSpec(name="a")]) as mocks:
        config = WorkerConfig(url=mocks.workers[0].url, name="a")
        async with (
            AgentHost(config, interval_s=0.1) as agent,
            watching(config.model_copy(update={"agent": agent.endpoint})) as watch,
        ):
            await watch.until_live()
            await complete(mocks.workers[0].url, 1)
            await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
            await asyncio.to_thread(mocks.kill, "a")
            await watch.until(lambda: not agent.agent.worker_up)
            watch.gateway.fleet.resync("a")
            await watch.until(lambda: not watch.gateway.router._keeper._give_up_at)
            assert watch.target().index_blocks["gpu"] == 0
            assert watch.target().index_state is IndexState.INCOMPLETE


async def test_a_worker_added_while_running_may_have_an_agent() -> None:
    async with MockFleet([MockSpec(name="a", replay="none")]) as mocks:
        url = mocks.workers[0].url
        async with AgentHost(WorkerConfig(url=url), interval_s=0.1) as agent, watching() as watch:
            admin = f"{watch.gateway.admin_url}/admin/workers"
            assert "tcp://HOST:PORT or ipc://PATH" in await _post(admin, {"url": url, "agent": "127.0.0.1:5600"})
            while not any(rank.whole for rank in agent.agent.ranks()):  # from the next clear on it knows everything
                await asyncio.to_thread(_reset, url)
                await complete(url, 1)
            added = json.loads(await _post(admin, {"url": url, "name": "a", "agent": agent.endpoint}))
            assert added["agent"]["endpoint"] == agent.endpoint
            await watch.until(lambda: watch.target().index_state is IndexState.LIVE)
            await watch.until(lambda: watch.census() == agent.agent.ranks()[0].census)
            assert await watch.matched(1) == BLOCKS * SIZE


async def _post(url: str, body: dict[str, str]) -> str:
    """Whatever the answer says, refusals included."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        return await answer.text()


async def test_what_is_wrong_with_an_agent_is_named() -> None:
    async with MockFleet([MockSpec(name="a"), MockSpec(name="b")]) as mocks:
        a, b = (WorkerConfig(url=worker.url, name=worker.name) for worker in mocks.workers)
        async with AgentHost(a, interval_s=0.1) as agent:
            wrong = b.model_copy(update={"agent": agent.endpoint})
            nobody = a.model_copy(update={"agent": "ipc:///nonexistent/kvrelay-agent"})
            async with watching(wrong, nobody) as watch:
                await watch.until(lambda: len(watch.gateway.status().workers) == 2)
                view = watch.gateway.fleet.view

                def problem(name: str) -> str:
                    seen = view(name).agent
                    return (seen.problem or "") if seen is not None else ""

                lives = f"({mocks.workers[0].incarnation}) than the worker ({mocks.workers[1].incarnation})"
                await watch.until(lambda: problem("b") == f"it watches another process {lives}")
                await watch.until(lambda: "does `kvrelay agent` run at ipc:///nonexistent" in problem("a"))
                await watch.until(lambda: watch.target("a").index_state is IndexState.LIVE)
                await watch.until(lambda: watch.target("b").index_state is IndexState.LIVE)
