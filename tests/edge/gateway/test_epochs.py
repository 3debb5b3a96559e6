"""Rotations over real mock workers: what was computed before is not met again, and nobody who is served notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.edge.gateway.epochs_file import read_epochs
from tests.edge.gateway.mocks import fleet_of, gateway_over
from tests.edge.gateway.scripted import ScriptedWorker, answer, client_of, receipts, running, token_body, until
from tests.scenarios.client import Client

PROMPT = list(range(2000, 2320))
ROTATE = "/admin/epochs/rotate"


@pytest.mark.covers("DR-11", "DR-12", "SG-19")
@pytest.mark.parametrize(
    "rotation",
    [
        {"trigger": "template"},
        {"trigger": "tokenizer", "keep": ["m0"]},
        {"trigger": "revision", "keep": ["m0"]},
        {"trigger": "tenant_policy", "tenant": "default"},
    ],
    ids=lambda rotation: rotation["trigger"],
)
async def test_an_old_prefix_is_never_hit_again_and_a_new_one_is(rotation: dict[str, Any]) -> None:
    async with fleet_of(1) as (_, gateway), client_of(gateway) as admin:
        client = Client(gateway.url)
        await client.complete(PROMPT)
        await until(lambda: gateway.status().index_blocks >= len(PROMPT) // 16)
        await client.complete(PROMPT)
        assert (await admin.admin("POST", ROTATE, rotation))[0] == 200
        matched = (await admin.admin("POST", "/admin/match", {"prompt": PROMPT}))[1]["candidates"]
        assert [each["matched_tokens"] for each in matched] == [0]
        for _ in range(2):
            await client.complete(PROMPT)
        new_again, new, again, old = receipts(gateway)
        assert old.epoch == again.epoch == "0" != new.epoch == new_again.epoch
        assert again.actual_cached_tokens and again.matched_tokens_at_route
        assert new.actual_cached_tokens == new.matched_tokens_at_route == 0
        assert new_again.actual_cached_tokens


@pytest.mark.covers("SG-20", "OP-11")
async def test_old_workers_end_what_they_have_and_get_nothing_more() -> None:
    async with fleet_of(2, decode_ms=20.0) as (fleet, gateway), client_of(gateway) as admin:
        client = Client(gateway.url)
        streams = [asyncio.ensure_future(client.complete(PROMPT[n:], max_tokens=40)) for n in range(4)]
        await until(lambda: gateway.status().live_requests == 4)
        answered = await admin.admin("POST", ROTATE, {"trigger": "revision", "keep": ["m1"]})
        assert answered[0] == 200 and answered[1]["retired_now"] == ["m0"]
        new = [await client.complete(PROMPT, max_tokens=1) for _ in range(3)]
        assert all(seen.status == 200 and seen.complete for seen in [*new, *await asyncio.gather(*streams)])
        by_epoch = {epoch: [each for each in receipts(gateway) if each.epoch == epoch] for epoch in "01"}
        assert {each.chosen_worker for each in by_epoch["0"]} == {"m0", "m1"}
        assert {each.chosen_worker for each in by_epoch["1"]} == {"m1"} and len(by_epoch["1"]) == 3
        fleet.restart("m0")
        await until(lambda: all(worker.routable for worker in gateway.status().workers), within_s=10)
        assert not any(worker.retired for worker in gateway.status().workers)


async def test_a_rotation_that_would_leave_nobody_is_refused_and_changes_nothing() -> None:
    async with fleet_of(1) as (_, gateway), client_of(gateway) as admin:
        status, problem = await admin.admin("POST", ROTATE, {"trigger": "revision"})
        assert status == 409 and "name them in `keep`" in problem["error"]["message"]
        assert (await admin.admin("GET", "/admin/epochs"))[1]["fleet"] == 0
        for body in ({"trigger": "revison"}, {"trigger": "adapter"}, {"trigger": "template", "tenant": "x"}, []):
            assert (await admin.admin("POST", ROTATE, body))[0] == 400
        assert (await admin.admin("POST", ROTATE, {"trigger": "revision", "keep": ["mo"]}))[0] == 404


async def test_epochs_outlive_the_gateway(tmp_path: Path) -> None:
    file = tmp_path / "epochs.json"
    async with fleet_of(1, gateway__epochs_file=str(file)) as (fleet, gateway):
        async with client_of(gateway) as admin:
            for _ in range(2):
                await admin.admin("POST", ROTATE, {"trigger": "template"})
        assert read_epochs(file).fleet == 2
        async with gateway_over(*fleet.workers, gateway__epochs_file=str(file)) as second:
            await Client(second.url).complete(PROMPT)
            assert receipts(second)[0].epoch == "2"


async def test_a_request_whose_text_was_being_tokenized_is_of_the_new_epoch() -> None:
    worker = ScriptedWorker("a")
    waiting: list[Any] = []
    original = worker._handle

    def slow(exchange: Any) -> None:
        if exchange.path == "/tokenize" and not waiting:
            waiting.append(exchange)
        else:
            original(exchange)

    worker._handle = slow  # type: ignore[method-assign]
    async with running(worker) as gateway, client_of(gateway) as client:
        asked = asyncio.ensure_future(client.post({"model": "m", "prompt": "a text", "max_tokens": 1}))
        await until(lambda: waiting)
        assert (await client.admin("POST", ROTATE, {"trigger": "template"}))[0] == 200
        original(waiting[0])
        assert (await asked)[0] == 200
        assert receipts(gateway)[0].epoch == "1"
        assert b"~epoch-1" in worker.requests[0].body


async def test_who_keeps_no_salts_apart_is_retired_until_a_new_life() -> None:
    workers = [ScriptedWorker("mixing", answer), ScriptedWorker("salting", answer)]
    for worker in workers:
        await worker.start()
    configured = [
        {"name": "mixing", "url": workers[0].url, "adapter": "openai"},
        {"name": "salting", "url": workers[1].url, "adapter": "vllm"},
    ]
    async with running(*workers, workers=configured) as gateway, client_of(gateway) as client:
        answered = await client.admin("POST", ROTATE, {"trigger": "template"})
        assert answered[1]["retired_now"] == ["mixing"]
        for _ in range(3):
            assert (await client.post(token_body()))[2]["x-kvrelay-worker"] == "salting"
