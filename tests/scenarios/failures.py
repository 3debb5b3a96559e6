"""S24 to S28 and S32 over HTTP: whose fault it is, who is tried instead, and where a session ends up."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from kvrelay.core.model.units import RouteReason, Status
from tests.scenarios.client import Seen
from tests.scenarios.stage import Stage


async def s24_a_prompt_that_is_too_long_is_the_clients_fault(stage: Stage) -> None:
    refused = await asyncio.gather(*(stage.client.complete([7] * 40_000) for _ in range(20)))
    normal = await stage.client.complete(stage.prompt())
    if stage.calm:
        assert {seen.status for seen in refused} == {400} and normal.status == 200
        assert all(b"maximum context length" in seen.body for seen in refused)
        assert all(len(stage.receipt(seen).attempts) == 1 for seen in refused)
        assert all(worker.up and worker.routable for worker in stage.gateway.status().workers)


async def s25_full_workers(stage: Stage) -> None:
    first, second = stage.routable()
    await stage.fault(first, kind="429", retry_after_s=7)
    one_full = await asyncio.gather(*(stage.client.complete(stage.prompt(), stream=bool(i % 2)) for i in range(20)))
    await stage.fault(second, kind="503", retry_after_s=7)
    both_full = [await stage.client.complete(stage.prompt()) for _ in range(6)]
    await stage.heal(first)
    await stage.heal(second)

    async def served() -> Seen:
        async with asyncio.timeout(20):
            while (seen := await stage.client.complete(stage.prompt())).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return seen

    await served()
    if stage.calm:
        assert Counter(seen.status for seen in one_full) == {200: 20}
        assert {seen.status for seen in both_full} <= {429, 503}
        assert {seen.headers["retry-after"] for seen in both_full} == {"7"}
        assert all(len(stage.receipt(seen).attempts) <= 2 for seen in both_full)
        assert all(worker.up for worker in stage.gateway.status().workers)


async def s26_the_preferred_worker_fails_every_request(stage: Stage) -> None:
    prompt = stage.prompt(640)
    holder = (await stage.client.complete(prompt)).worker or stage.routable()[0]
    await stage.fault(holder, kind="500")
    turns = [await stage.client.complete(prompt, stream=bool(i % 2)) for i in range(50)]
    await stage.heal(holder)
    if stage.calm:
        assert Counter(seen.status for seen in turns) == {200: 50}
        tried = [[attempt.worker for attempt in stage.receipt(seen).attempts] for seen in turns]
        assert all(len(set(names)) == len(names) for names in tried)
        assert sum(holder in names for names in tried) <= 25, "after a few failures it is only tried now and then"


async def s27_a_worker_dies_before_its_first_byte_and_in_mid_stream(stage: Stage) -> None:
    first, second = stage.routable()
    await stage.fault(first, kind="die_after_chunks", chunks=0, count=1)
    unseen = [await stage.client.complete(stage.prompt(), stream=True, max_tokens=12) for _ in range(2)]
    await _back(stage, first)
    for worker in (first, second):
        await stage.fault(worker, kind="die_after_chunks", chunks=5, count=1)
    cut = await stage.client.complete(stage.prompt(), stream=True, max_tokens=4000)
    if stage.calm:
        assert [seen.status for seen in unseen] == [200, 200] and all(seen.complete for seen in unseen)
        assert [attempt.worker for attempt in stage.receipt(unseen[0]).attempts] == [first, second]
        receipt = stage.receipt(cut)
        assert (receipt.status, len(receipt.attempts), cut.complete) == (Status.WORKER_LOST, 1, False)
        assert 5 <= cut.body.count(b'"text"') < 4000
        receiver = second if receipt.chosen_worker == first else first
        assert stage.fleet.worker(receiver).alive, "the other worker, which dies of its next request, got none"
    for worker in (first, second):
        await _back(stage, worker)


async def _back(stage: Stage, worker: str) -> None:
    """If it died, it is started again."""
    running = stage.fleet.worker(worker)
    if await asyncio.to_thread(running.wait, 0.5) is not None:
        running = await asyncio.to_thread(stage.fleet.restart, worker)
    await stage.heal(worker)
    await stage.until(
        lambda: any(w.routable and w.incarnation == running.incarnation for w in stage.gateway.status().workers)
    )


async def s28_errors_of_streaming_requests_are_the_workers_own(stage: Stage) -> None:
    bodies: list[dict[str, object]] = [{"n": 0}, {"model": "none"}, {"max_tokens": "many"}]
    for status, body in zip((400, 404, 400), bodies, strict=True):
        seen = await stage.client.complete(stage.prompt(), **{"stream": True, **body})
        if stage.calm:
            assert (seen.status, msgspec.json.decode(seen.body)["error"]["code"]) == (status, status)
            assert seen.headers["content-type"].startswith("application/json")
    for kind in ("429", "500"):
        for worker in stage.routable():
            await stage.heal(worker)
            await stage.fault(worker, kind=kind)
        seen = await stage.client.complete(stage.prompt(), stream=True)
        if stage.calm:
            assert (seen.status, msgspec.json.decode(seen.body)["error"]["code"]) == (int(kind), int(kind))
    for worker in ("w0", "w1"):
        await stage.heal(worker)


async def s32_eight_first_turns_of_one_session(stage: Stage) -> None:
    for session in ("calm", "hanging", "left"):
        prompt = stage.prompt(640)
        if session == "hanging":
            for worker in stage.routable():
                await stage.fault(worker, kind="hang", count=1)  # of each, so that the very first one hangs
        leaving = {"leave_after_s": 0.5} if session == "hanging" else {}
        turns = [asyncio.ensure_future(stage.client.complete(prompt, session=session, **leaving)) for _ in range(7)]
        leave_at_once = 0.001 if session == "left" else leaving.get("leave_after_s")
        turns.append(asyncio.ensure_future(stage.client.complete(prompt, session=session, leave_after_s=leave_at_once)))
        started = [turn for turn in await asyncio.gather(*turns) if turn.worker is not None]
        await stage.heal("w0")
        await stage.heal("w1")
        following = [await stage.client.complete(prompt, session=session) for _ in range(3)]
        if stage.calm:
            assert len(started) >= 6
            assert len({turn.worker for turn in (*started, *following)}) == 1, session
            assert {turn.reason for turn in following} == {RouteReason.STICKY_BOUND}
            assert [key.session_id for key in stage.gateway.router.sessions()].count(session) == 1
