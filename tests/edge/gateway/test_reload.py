"""A new configuration under a running gateway: what changes, what goes on, and what a bad one does (nothing)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.http.server import Exchange
from kvrelay.edge.system.config import Config, load_config
from tests.edge.gateway.scripted import (
    EVENT_STREAM,
    ScriptedWorker,
    chunk,
    client_of,
    gauges_are_zero,
    hang,
    receipts,
    running,
    token_body,
    until,
)


def changed(gateway: Gateway, *workers: ScriptedWorker, **flags: Any) -> Config:
    """The gateway's configuration with these workers and keys instead of its own (`__` for dots)."""
    values: dict[str, Any] = {
        "workers": [{"name": worker.name, "url": worker.url, "adapter": "vllm"} for worker in workers],
        "gateway.port": gateway.config.gateway.port,
        "gateway.admin_port": gateway.config.gateway.admin_port,
        "health.interval_s": 0.1,
    }
    values.update({name.replace("__", "."): value for name, value in flags.items()})
    return load_config(Path("/dev/null"), {}, values)


def routable(gateway: Gateway) -> list[str]:
    return [worker.name for worker in gateway.status().workers if worker.routable]


@pytest.mark.covers("OP-11")
async def test_streams_go_on_while_their_worker_is_removed_and_another_comes() -> None:
    streams: list[Exchange] = []

    def script(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        exchange.write(chunk("one"))
        streams.append(exchange)

    old, new = ScriptedWorker("old", script), ScriptedWorker("new")
    await new.start()
    async with running(old) as gateway, client_of(gateway) as client:
        streaming = asyncio.create_task(client.post(token_body(stream=True), x_request_id="streaming"))
        await until(lambda: streams)
        assert await gateway.reload(changed(gateway, new)) == ()
        assert gateway.fleet.names() == ("new",)
        await until(lambda: routable(gateway) == ["new"])
        assert (await client.post(token_body()))[2]["x-kvrelay-worker"] == "new"
        streams[0].write(chunk("two"))
        streams[0].finish()
        status, body, _ = await streaming
        assert (status, body) == (200, chunk("one") + chunk("two"))
        ended = {each.request_id: each for each in receipts(gateway)}["streaming"]
        assert (ended.status, ended.chosen_worker) == ("ok", "old")
        await until(lambda: gauges_are_zero(gateway))
    await new.stop()


async def test_what_the_file_says_takes_effect_and_what_waits_for_a_start_is_named(tmp_path: Path) -> None:
    worker = ScriptedWorker("a")
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with running(worker) as gateway, client_of(gateway) as client:
        before = gateway.describe()["manifest_digest"]
        wanted = changed(
            gateway,
            worker,
            gateway__policy="round_robin",
            gateway__limits__body_bytes=1024,
            gateway__limits__streamed_body_bytes=1024,
            gateway__admin_token_file=token,
            affinity__header="x-conversation",
            gateway__processes=1,
            gateway__port=9,
            tokens__cache_mb=1,
        )
        assert await gateway.reload(wanted) == ("gateway.port", "tokens.cache_mb")
        assert gateway.config.gateway.port == 0
        assert (await client.post(token_body(2000)))[0] == 413
        assert (await client.post(token_body(), x_conversation="s"))[0] == 200
        (receipt, *_) = receipts(gateway)
        assert (receipt.policy, receipt.session_id) == ("round_robin", "s")
        assert receipt.manifest_digest == gateway.describe()["manifest_digest"] != before
        assert (await client.admin("GET", "/admin/status"))[0] == 401
        _, status = await client.admin("GET", "/admin/status", Authorization="Bearer secret")
        assert status["config"]["generation"] == 2
        assert status["config"]["needs_restart"] == ["gateway.port", "tokens.cache_mb"]


async def test_connections_stay_open_over_a_reload() -> None:
    worker = ScriptedWorker("a")
    connector = aiohttp.TCPConnector(limit=1)
    async with running(worker) as gateway, aiohttp.ClientSession(connector=connector) as session:

        async def ask() -> int:
            async with session.post(gateway.url + "/v1/completions", json=token_body()) as response:
                await response.read()
                return response.status

        assert await ask() == 200
        (connection,) = gateway._server.connections  # type: ignore[union-attr]
        await gateway.reload(changed(gateway, worker, gateway__limits__header_bytes=2048))
        assert await ask() == 200
        assert list(gateway._server.connections) == [connection]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"tenants": {"acme": {"api_keys_file": "/absent/keys"}}}, OSError),
        ({"gateway__admin_token_file": "/absent/token"}, OSError),
        ({"workers": [{"url": "http://127.0.0.1:9", "api_key_file": "/absent/key"}]}, OSError),
        ({"workers": [{"name": "another", "url": "LATE"}]}, ValueError),
    ],
)
async def test_a_configuration_that_cannot_be_taken_changes_nothing(
    flags: dict[str, Any], problem: type[Exception]
) -> None:
    worker, late = ScriptedWorker("a"), ScriptedWorker("late")
    await late.start()
    async with running(worker) as gateway, client_of(gateway) as client:
        await client.admin("POST", "/admin/workers", {"url": late.url, "name": "late"})
        before = (gateway.config, gateway.fleet.names(), gateway.router.settings)
        for entry in flags.get("workers", ()):
            entry["url"] = entry["url"].replace("LATE", late.url)
        wanted = changed(gateway, **{"gateway__policy": "random", **flags})
        with pytest.raises(problem):
            await gateway.reload(wanted)
        assert (gateway.config, gateway.fleet.names(), gateway.router.settings) == before
        assert (await client.post(token_body()))[0] == 200
    await late.stop()


async def test_tenants_and_the_keys_of_workers_change_without_a_restart(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text("first\n")
    theirs.write_text("old\n")
    worker = ScriptedWorker("a")
    await worker.start()
    keyed: dict[str, Any] = {
        "workers": [{"name": "a", "url": worker.url, "adapter": "vllm", "api_key_file": theirs}],
        "tenants": {"acme": {"api_keys_file": str(ours)}},
    }
    async with running(worker, **keyed) as gateway, client_of(gateway) as client:
        assert (await client.post(token_body(), Authorization="Bearer first"))[0] == 200
        fingerprint = receipts(gateway)[0].prefix_fingerprint
        incarnation = gateway.status().workers[0].incarnation
        ours.write_text("second\n")
        theirs.write_text("new\n")
        await gateway.reload(changed(gateway, **keyed))
        assert (await client.post(token_body(), Authorization="Bearer first"))[0] == 401
        assert (await client.post(token_body(), Authorization="Bearer second"))[0] == 200
        assert [seen.header(b"authorization") for seen in worker.requests] == [b"Bearer old", b"Bearer new"]
        assert receipts(gateway)[0].prefix_fingerprint == fingerprint, "equal prefixes no longer show as equal"
        assert gateway.status().workers[0].incarnation == incarnation, "the worker is the same, only its key is not"


async def test_a_drained_worker_stays_drained_when_its_settings_change() -> None:
    workers = [ScriptedWorker(name) for name in "ab"]
    async with running(*workers) as gateway, client_of(gateway) as client:
        await client.admin("POST", "/admin/workers/a/drain")
        entries = [{"name": worker.name, "url": worker.url, "adapter": "vllm"} for worker in workers]
        entries[0]["max_active_requests"] = 3  # type: ignore[assignment]
        await gateway.reload(changed(gateway, workers=entries))
        await until(lambda: {worker.name for worker in gateway.status().workers} == {"a", "b"})
        assert routable(gateway) == ["b"]
        assert (await client.admin("GET", "/admin/workers/a"))[1]["draining"] is True


async def test_a_shorter_total_time_ends_younger_requests_before_older_ones() -> None:
    worker = ScriptedWorker("a", hang)
    async with running(worker, gateway__timeouts__total_s=600) as gateway, client_of(gateway) as client:
        older = asyncio.create_task(client.post(token_body()))
        await until(lambda: worker.requests)
        await gateway.reload(changed(gateway, worker, gateway__timeouts__total_s=0.2))
        assert (await client.post(token_body()))[0] == 504
        assert not older.done()
        worker.requests[0].respond(200, (), b"{}")
        assert (await older)[0] == 200


async def test_probes_follow_a_new_interval_and_timeout() -> None:
    worker = ScriptedWorker("a")
    async with running(worker, health__interval_s=3600) as gateway:
        session = gateway.fleet.session_of("a")
        await gateway.reload(changed(gateway, worker, health__interval_s=0.05, health__timeout_s=0.5))
        assert gateway.fleet.session_of("a") is not session and gateway.fleet.session_of("a").timeout.total == 0.5
        assert not session.closed, "questions under way need it"
    assert session.closed
