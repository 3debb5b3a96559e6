"""Session bindings as clients see them through the gateway."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.core.model.units import RouteReason
from kvrelay.edge.http.server import Exchange
from tests.edge.gateway.scripted import ScriptedWorker, answer, client_of, receipts, running, token_body, until


@pytest.mark.covers("RT-05")
async def test_a_worker_that_refuses_the_connection_gets_no_binding() -> None:
    first, second = ScriptedWorker("a"), ScriptedWorker("b")
    flags = {"gateway__policy": "sticky", "health__failures": 1000, "health__interval_s": 60}
    async with running(first, second, **flags) as gateway, client_of(gateway) as client:
        await first.stop()
        _, _, headers = await client.post(token_body(), x_session_id="s")
        assert headers["x-kvrelay-worker"] == "b"
        assert [attempt.worker for attempt in receipts(gateway)[0].attempts] == ["a", "b"]
        _, answer = await client.admin("GET", "/admin/sessions")
        assert [(each["session_id"], each["worker"]) for each in answer["sessions"]] == [("s", "b")]
        await first.start()
        _, _, headers = await client.post(token_body(), x_session_id="s")
        assert (headers["x-kvrelay-worker"], headers["x-kvrelay-route-reason"]) == ("b", "sticky_bound")


@pytest.mark.covers("RT-21")
async def test_health_goes_before_affinity() -> None:
    workers = {name: ScriptedWorker(name) for name in "ab"}
    async with running(*workers.values(), gateway__policy="sticky") as gateway, client_of(gateway) as client:
        _, _, headers = await client.post(token_body(), x_session_id="s")
        bound = headers["x-kvrelay-worker"]
        workers[bound].healthy = False
        await until(lambda: not all(worker.up for worker in gateway.status().workers))
        _, _, headers = await client.post(token_body(), x_session_id="s")
        assert headers["x-kvrelay-worker"] != bound
        assert headers["x-kvrelay-route-reason"] == RouteReason.AFFINITY_BROKEN_UNHEALTHY


@pytest.mark.covers("SG-22")
async def test_a_closed_session_is_bound_anew() -> None:
    workers = [ScriptedWorker(name) for name in "abc"]
    async with running(*workers, gateway__policy="sticky") as gateway, client_of(gateway) as client:
        await client.post(token_body(), x_dynamo_session_id="s")
        status, _ = await client.admin("DELETE", "/admin/sessions/s")
        assert status == 200
        _, _, headers = await client.post(token_body(), x_session_id="s")
        assert headers["x-kvrelay-route-reason"] == RouteReason.STICKY_FIRST
        assert (await client.admin("DELETE", "/admin/sessions/unknown"))[0] == 404


@pytest.mark.covers("SG-22", "DR-11")
async def test_a_turn_that_outlives_its_session_does_not_revive_it() -> None:
    held: list[Exchange] = []
    workers = [ScriptedWorker(name, held.append) for name in "ab"]
    async with running(*workers, gateway__policy="sticky") as gateway, client_of(gateway) as client:
        asking = asyncio.create_task(client.post(token_body(), x_session_id="s"))
        await until(lambda: held)
        assert (await client.admin("DELETE", "/admin/sessions/s"))[0] == 200
        held.pop().respond(200, (), b"{}")
        assert (await asking)[0] == 200
        assert (await client.admin("GET", "/admin/sessions"))[1] == {"sessions": []}
        assert (await client.admin("DELETE", "/admin/sessions/s"))[0] == 404
        for worker in workers:
            worker.script = answer
        _, _, headers = await client.post(token_body(), x_session_id="s")
        assert headers["x-kvrelay-route-reason"] == RouteReason.STICKY_FIRST


@pytest.mark.covers("RT-24")
async def test_a_turn_whose_worker_is_too_busy_spills_and_is_counted() -> None:
    held: list[Exchange] = []
    workers = {name: ScriptedWorker(name) for name in "ab"}
    flags = {"gateway__policy": "sticky_load", "policy__sticky_load__spill_requests": 2}
    async with running(*workers.values(), **flags) as gateway, client_of(gateway) as client:
        home = (await client.post(token_body(), x_session_id="s"))[2]["x-kvrelay-worker"]
        workers[home].script = held.append
        pending = [asyncio.create_task(client.post(token_body(), x_session_id="s")) for _ in range(3)]
        await until(lambda: len(held) == 3)
        _, _, headers = await client.post(token_body(), x_session_id="s")
        assert headers["x-kvrelay-worker"] != home
        assert headers["x-kvrelay-route-reason"] == RouteReason.STICKY_SPILL
        assert receipts(gateway)[0].spilled_from == home
        assert "kvrelay_spills_total 1.0" in (await client.admin("GET", "/metrics"))[1]
        for exchange in held:
            exchange.respond(200, (), b"{}")
        await asyncio.gather(*pending)
        workers[home].script = answer
        _, _, headers = await client.post(token_body(), x_session_id="s")
        assert (headers["x-kvrelay-worker"], headers["x-kvrelay-route-reason"]) == (home, RouteReason.STICKY_BOUND)


@pytest.mark.covers("S03")
async def test_a_burst_is_spread_by_what_was_dispatched_and_not_by_what_was_reported() -> None:
    held: list[Exchange] = []
    workers = [ScriptedWorker(name, held.append) for name in "ab"]
    async with running(*workers, health__interval_s=60) as gateway:
        async with client_of(gateway) as client:
            pending = [
                asyncio.create_task(client.post({"model": "m", "prompt": list(range(i * 1000, i * 1000 + 64))}))
                for i in range(8)
            ]
            await until(lambda: len(held) == 8)
            split = sorted(len(worker.requests) for worker in workers)
            for exchange in held:
                exchange.respond(200, (), b"{}")
            await asyncio.gather(*pending)
        assert split[0] >= 3, split
