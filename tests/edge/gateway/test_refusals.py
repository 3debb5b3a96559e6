"""Mock workers that are full or broken, and what their clients notice of it: nothing while another worker can serve."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import aiohttp
import msgspec
import pytest

from kvrelay.core.model.events import PolicyChanged
from kvrelay.core.model.units import Status
from kvrelay.edge.gateway.gateway import Gateway
from tests.edge.gateway.direct import Answer, ask
from tests.edge.gateway.mocks import fault, fleet_of, heal
from tests.edge.gateway.scripted import receipts, until

COMPLETIONS = "/v1/completions"
PROMPT = list(range(1000, 1640))


async def complete(gateway: Gateway, prompt: list[int] = PROMPT, **members: object) -> Answer:
    body = {"prompt": prompt, "max_tokens": 2, **members}
    raw = msgspec.json.encode(body)
    lines = b"POST %b HTTP/1.1\r\nHost: HOST\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return await ask(gateway.url, lines % (COMPLETIONS.encode(), len(raw)) + raw)


def by(answer: Answer) -> str:
    return dict(answer.headers)[b"x-kvrelay-worker"].decode()


async def warm(gateway: Gateway) -> str:
    """The name of the worker that from now on holds the prompt, and is preferred for it."""
    for _ in range(2):
        holder = by(await complete(gateway))
        await asyncio.sleep(0.2)
    return holder


def all_up(gateway: Gateway) -> bool:
    return all(worker.up for worker in gateway.status().workers)


@pytest.mark.covers("S25")
@pytest.mark.parametrize("kind", ["429", "503"])
@pytest.mark.parametrize("hint", [{}, {"retry_after_s": 7}])
async def test_one_of_two_is_full_and_the_other_serves(kind: str, hint: dict[str, int]) -> None:
    async with fleet_of(2) as (fleet, gateway):
        holder = await warm(gateway)
        await fault(fleet.worker(holder).url, kind=kind, **hint)
        answers = [await complete(gateway, stream=number % 2 == 0) for number in range(60)]
        assert Counter(answer.status for answer in answers) == {200: 60}
        assert holder not in map(by, answers)
        assert all_up(gateway)
        await heal(fleet.worker(holder).url)


@pytest.mark.covers("S25")
async def test_many_at_once_to_a_full_one_are_all_served_by_the_other() -> None:
    async with fleet_of(2) as (fleet, gateway):
        holder = await warm(gateway)
        await fault(fleet.worker(holder).url, kind="429")
        answers = await asyncio.gather(*(complete(gateway) for _ in range(60)))
        assert Counter(answer.status for answer in answers) == {200: 60}


@pytest.mark.covers("S25")
async def test_both_are_full_and_the_refusal_passes_with_its_hint() -> None:
    async with fleet_of(2) as (fleet, gateway):
        for worker in fleet.workers:
            await fault(worker.url, kind="429", retry_after_s=7)
        for _ in range(20):
            answer = await complete(gateway)
            assert (answer.status, dict(answer.headers)[b"retry-after"]) == (429, b"7")
            assert msgspec.json.decode(answer.body)["error"]["code"] == 429
        assert all(1 <= len(receipt.attempts) <= 2 for receipt in receipts(gateway))
        assert all_up(gateway)


@pytest.mark.covers("S25")
@pytest.mark.parametrize("hint", [{}, {"retry_after_s": 30}])
async def test_the_only_worker_is_full_for_a_while(hint: dict[str, int]) -> None:
    async with fleet_of(1) as (fleet, gateway):
        await fault(fleet.workers[0].url, kind="503", **hint)
        until_s = time.monotonic() + 1.5
        while time.monotonic() < until_s:
            assert (await complete(gateway)).status == 503
            await asyncio.sleep(0.02)
        await heal(fleet.workers[0].url)
        healed_at = time.monotonic()
        while (await complete(gateway)).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert time.monotonic() - healed_at < 1.0
        assert all_up(gateway)


@pytest.mark.covers("S26")
@pytest.mark.parametrize("kind", ["500", "refuse", "garbage"])
async def test_the_holder_fails_every_request_and_nobody_notices(kind: str) -> None:
    async with fleet_of(2) as (fleet, gateway):
        holder = await warm(gateway)
        before = len(receipts(gateway))
        await fault(fleet.worker(holder).url, kind=kind)
        answers = []
        for number in range(50):
            answers.append(await complete(gateway, stream=number % 2 == 0))
            await asyncio.sleep(0.02)
        assert Counter(answer.status for answer in answers) == {200: 50}
        made = receipts(gateway)[: -before or None]
        assert all(receipt.status is Status.OK for receipt in made)
        tried = [[attempt.worker for attempt in receipt.attempts] for receipt in made]
        assert all(len(set(names)) == len(names) for names in tried)
        assert sum(holder in names for names in tried) <= 8, "a worker that fails is only tried now and then"
        await heal(fleet.worker(holder).url)
        gateway.host.feed(PolicyChanged("round_robin"))  # the other one holds the prompt as well by now
        async with asyncio.timeout(10):
            while by(await complete(gateway)) != holder:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.covers("S02")
@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_is_missed_by_its_worker_within_a_second(streams: bool) -> None:
    async with fleet_of(2) as (fleet, gateway):
        for worker in fleet.workers:
            await fault(worker.url, kind="delay", ms=30_000)
        asking = asyncio.create_task(complete(gateway, stream=streams))
        await until(lambda: gateway.describe()["open_upstream_calls"] == 1)
        await asyncio.sleep(0.2)
        asking.cancel()
        left_at = time.monotonic()
        seen: list[float] = []
        async with aiohttp.ClientSession() as session, asyncio.timeout(5):
            while not seen:
                for worker in fleet.workers:
                    async with session.get(worker.url + "/mock/state") as response:
                        seen += [abort["seen_at"] for abort in (await response.json())["aborts"]]
        assert seen[0] - left_at < 1.0
        await until(lambda: len(receipts(gateway)) == 1)
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (Status.CLIENT_CANCELLED, None)
        assert receipt.attempts[0].fault is None
        assert all_up(gateway) and all(worker.routable for worker in gateway.status().workers)
