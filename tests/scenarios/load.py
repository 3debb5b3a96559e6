"""S01 to S06 over HTTP: whose load counts, and where requests go because of it."""

from __future__ import annotations

import asyncio
from collections import Counter

from kvrelay.core.model.units import RouteReason, Status
from tests.edge.gateway.scripted import gauges_are_zero
from tests.scenarios.client import COMPLETIONS, Seen
from tests.scenarios.stage import Stage


async def s01_clients_leave_at_every_stage(stage: Stage) -> None:
    """Before the head (the worker is slow), after it, and in mid-body, streaming and not."""
    for worker in stage.routable():
        await stage.fault(worker, kind="delay", ms=3000.0, count=3)
    slow = [stage.client.complete(stage.prompt(), stream=bool(i % 2), leave_after_s=0.1) for i in range(8)]
    await asyncio.gather(*slow)
    await stage.until(lambda: gauges_are_zero(stage.gateway))
    for worker in stage.routable():
        await stage.heal(worker)

    def answering(streams: bool, chunks: int) -> asyncio.Future[Seen]:
        return asyncio.ensure_future(
            stage.client.complete(
                stage.prompt(),
                max_tokens=2000,
                stream=streams,
                leave_when=(lambda answer: answer.body.count(b"data:") >= chunks) if streams else None,
                leave_after_s=5.0 if streams else 0.3,
            )
        )

    gone = await asyncio.gather(*(answering(bool(i % 2), chunks=1 + i) for i in range(8)))
    await stage.until(lambda: gauges_are_zero(stage.gateway))
    if stage.calm:
        assert all(seen.left for seen in gone)
        assert all(worker.up for worker in stage.gateway.status().workers)
        assert {stage.receipt(seen).status for seen in stage.client.seen} == {Status.CLIENT_CANCELLED}


async def s02_a_client_does_not_wait_for_a_slow_answer(stage: Stage) -> None:
    for worker in stage.routable():
        await stage.fault(worker, kind="delay", ms=30_000.0, count=1)
    left = [await stage.client.complete(stage.prompt(), stream=streams, leave_after_s=0.2) for streams in (False, True)]
    await stage.until(lambda: gauges_are_zero(stage.gateway))
    if stage.calm:
        for seen in left:
            receipt = stage.receipt(seen)
            assert (receipt.status, receipt.failure_reason) == (Status.CLIENT_CANCELLED, None)
        assert all(worker.up and worker.routable for worker in stage.gateway.status().workers)


async def s03_a_burst_is_spread_although_reports_are_old(stage: Stage) -> None:
    """Reports come every 5 s here, so all they say during the burst is older than it."""
    burst = await asyncio.gather(*(stage.client.complete(stage.prompt(640), max_tokens=16) for _ in range(8)))
    if stage.calm:
        assert min(Counter(seen.worker for seen in burst).values()) >= 3


async def s04_warm_sessions_return_while_another_worker_is_saturated(stage: Stage) -> None:
    histories = {f"s{i}": stage.prompt(960) for i in range(12)}
    holders = {name: (await stage.client.complete(history)).worker for name, history in histories.items()}
    for name, history in histories.items():
        if stage.calm:
            await stage.until_held(history, holders[name])
    saturated = stage.routable()[-1]
    unrelated = [asyncio.ensure_future(_directly(stage, saturated)) for _ in range(24)]
    await stage.until(lambda: stage.load(saturated) > 16 or all(each.done() for each in unrelated))
    turns = await asyncio.gather(
        *(stage.client.complete([*history, *stage.prompt(32)]) for history in histories.values())
    )
    for each in unrelated:
        each.cancel()
    await asyncio.gather(*unrelated, return_exceptions=True)
    if stage.calm:
        warm = [(turn, holder) for turn, holder in zip(turns, holders.values(), strict=True) if holder != saturated]
        home = [turn for turn, holder in warm if turn.worker == holder]
        assert len(warm) >= 6 and len(home) >= 0.95 * len(warm)
        moved = [turn for turn, holder in zip(turns, holders.values(), strict=True) if turn.worker != holder]
        assert {turn.reason for turn in moved} <= {RouteReason.CACHE_SPILL}


async def s05_a_full_cache_is_no_reason_for_a_prompt_without_overlap(stage: Stage) -> None:
    busy, idle = stage.routable()
    warming = [asyncio.ensure_future(_directly(stage, idle, tokens=640, max_tokens=1)) for _ in range(20)]
    await asyncio.gather(*warming)
    unrelated = [asyncio.ensure_future(_directly(stage, busy)) for _ in range(20)]
    await stage.until(lambda: (stage.load(busy) > 12 and stage.load(idle) == 0) or all(e.done() for e in unrelated))
    new = [await stage.client.complete(stage.prompt(640)) for _ in range(6)]
    for each in unrelated:
        each.cancel()
    await asyncio.gather(*unrelated, return_exceptions=True)
    if stage.calm:
        assert [seen.worker for seen in new] == [idle] * 6


async def s06_one_shared_system_prompt_makes_no_hot_worker(stage: Stage) -> None:
    """The figures are meant for an idle machine; on a busy one a round may miss them, but not every round."""
    for _ in range(3 if stage.calm else 1):
        turns = await _converse(stage)
        counts = Counter(worker for _, worker in turns)
        returned = [home == worker for home, worker in turns if home is not None]
        if max(counts.values()) <= 1.5 * len(turns) / 4 and sum(returned) >= 0.8 * len(returned):
            return
    assert stage.faulty, (counts, sum(returned), len(returned))


async def _converse(stage: Stage) -> list[tuple[str | None, str | None]]:
    """Turns of 16 sessions that begin alike, 8 in flight: the worker of the turn before, and of this one."""
    shared, gate = stage.prompt(3200), asyncio.Semaphore(8)
    turns: list[tuple[str | None, str | None]] = []

    async def converse() -> None:
        history, home = shared, None
        for _ in range(5):
            history = [*history, *stage.prompt(960)]
            async with gate:
                seen = await stage.client.complete(history)
            turns.append((home, seen.worker))
            home = seen.worker

    await asyncio.gather(*(converse() for _ in range(16)))
    return turns


async def _directly(stage: Stage, worker: str, *, tokens: int = 320, max_tokens: int = 4000) -> None:
    """A request of somebody who does not use the gateway."""
    body = {"prompt": stage.prompt(tokens), "max_tokens": max_tokens}
    await type(stage.client)(stage.fleet.worker(worker).url).send(COMPLETIONS, body)
