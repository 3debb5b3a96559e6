"""Start, drain and end of a gateway; who may listen where; who is let in; what is never written down."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvrelay.core.model.units import Status
from kvrelay.edge.gateway.gateway import Gateway, UnsafeListener, refuse_unsafe_listeners
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


def config(**flags: object) -> Config:
    return load_config(Path("/dev/null"), {}, {name.replace("__", "."): value for name, value in flags.items()})


async def test_health_is_alive_and_ready_needs_a_worker() -> None:
    worker = ScriptedWorker("a")
    async with running(worker) as gateway, client_of(gateway) as client:
        assert (await client.post({}, "/health"))[0] == 200
        assert (await client.post({}, "/ready"))[0] == 200
        worker.healthy = False
        await until(lambda: not gateway.status().workers[0].routable)
        assert (await client.post({}, "/ready"))[:2] == (503, b'{"status":"no_worker_routable"}')
        assert (await client.post({}, "/health"))[0] == 200
        assert len(worker.requests) == 0


def hold_open(streams: list[Exchange]) -> Callable[[Exchange], None]:
    """A worker's script: one event, then nothing until the test says so."""

    def script(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        exchange.write(chunk("one"))
        streams.append(exchange)

    return script


@pytest.mark.covers("OP-11", "RC-11")
async def test_draining_says_so_refuses_new_requests_with_a_receipt_and_lets_streams_end() -> None:
    streams: list[Exchange] = []
    worker = ScriptedWorker("a", hold_open(streams))
    async with running(worker) as gateway, client_of(gateway) as client:
        streaming = asyncio.create_task(client.post(token_body(stream=True), x_request_id="streaming"))
        await until(lambda: streams)
        draining = asyncio.create_task(gateway.drain())
        await until(lambda: gateway.router.draining)
        assert (await client.post({}, "/ready"))[:2] == (503, b'{"status":"draining"}')
        assert (await client.post({}, "/health"))[0] == 200
        status, _, headers = await client.post({"model": "m", "prompt": "a text"}, x_request_id="late")
        assert (status, headers["retry-after"], headers["x-kvrelay-reason"]) == (503, "5", "gateway_draining")
        assert worker.tokenized == [], "the tokens of a request that is refused anyway are not asked for"
        assert not draining.done()
        streams[0].finish()
        assert (await streaming)[0] == 200
        assert await draining == 0
        ended = {each.request_id: (each.status, each.failure_reason) for each in receipts(gateway)}
        assert ended == {"streaming": (Status.OK, None), "late": (Status.REFUSED, "gateway_draining")}


@pytest.mark.covers("OP-11")
async def test_what_does_not_end_within_the_grace_is_cut_and_told_why() -> None:
    worker = ScriptedWorker("a", hang)
    async with running(worker, gateway__drain__grace_s=0.1) as gateway, client_of(gateway) as client:
        asking = asyncio.create_task(client.post(token_body()))
        await until(lambda: worker.requests)
        assert await gateway.drain() == 1
        status, _, headers = await asking
        assert (status, headers["x-kvrelay-reason"], headers["retry-after"]) == (503, "drain_grace_over", "5")
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (Status.ERROR, "drain_grace_over")
        assert receipt.attempts[0].fault is None, "the worker is not to blame"
        await until(lambda: worker.left)
        assert gauges_are_zero(gateway)


async def rest_of_stream(gateway: Gateway) -> bytes:
    """What a client still gets of a stream whose first event it has, when the gateway stops at once."""
    body = msgspec.json.encode(token_body(stream=True, stream_options={"include_usage": True}))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await reader.readuntil(chunk("one"))
    _, rest = await asyncio.gather(gateway.stop(), reader.read())
    writer.close()
    return rest


@pytest.mark.covers("OP-11")
async def test_a_stream_that_is_cut_says_why_and_is_seen_as_broken() -> None:
    async with running(ScriptedWorker("a", hold_open([]))) as gateway:
        rest = await rest_of_stream(gateway)
        assert b'data: {"error":{"message":"this gateway is shutting down and broke the answer off: gateway_st' in rest
        assert not rest.endswith(b"0\r\n\r\n"), "it looks like a complete answer"
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason, receipt.http_status) == (Status.ERROR, "gateway_stopped", 200)


async def test_nothing_is_said_in_the_middle_of_an_event() -> None:
    def half_an_event(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        exchange.write(chunk("one") + b'data: {"choi')

    async with running(ScriptedWorker("a", half_an_event)) as gateway:
        rest = await rest_of_stream(gateway)
        assert b"error" not in rest and not rest.endswith(b"0\r\n\r\n")


@pytest.mark.covers("MK-10")
async def test_listeners_are_on_loopback_unless_told_otherwise() -> None:
    assert (config().gateway.host, config().gateway.admin_host) == ("127.0.0.1", "127.0.0.1")
    for flags in ({"gateway__host": "0.0.0.0"}, {"gateway__admin_host": "0.0.0.0"}, {"gateway__host": "::"}):
        with pytest.raises(UnsafeListener, match=r"beyond loopback"):
            refuse_unsafe_listeners(config(**flags))
    refuse_unsafe_listeners(config(gateway__host="0.0.0.0", gateway__insecure=True))
    async with running() as gateway:
        for url in (gateway.url, gateway.admin_url):
            port = int(url.rpartition(":")[2])
            with socket.socket() as other_address, pytest.raises(ConnectionRefusedError):
                other_address.connect(("127.0.0.2", port))


async def test_a_taken_port_ends_the_start_and_leaves_nothing_open() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError):
            await Gateway(config(gateway__port=0, gateway__admin_port=port)).start()
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_a_key_decides_the_tenant_and_stays_here(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-one\nkey-two\n")
    worker = ScriptedWorker("a")
    tenants = {"tenants": {"acme": {"api_keys_file": str(keys)}}}
    async with running(worker, **tenants) as gateway, client_of(gateway) as client:
        assert (await client.post(token_body()))[0] == 401
        assert (await client.post(token_body(), Authorization="Bearer key-three"))[0] == 401
        assert (await client.post(token_body(user="evil"), Authorization="Bearer key-two"))[0] == 200
        assert [each.tenant for each in receipts(gateway)] == ["acme"], "who has no key leaves no receipt"
        assert "kvrelay_unauthorized_total 2.0" in (await client.admin("GET", "/metrics"))[1]
        (seen,) = worker.requests
        assert seen.header(b"authorization") is None
        assert (await client.post({}, "/health"))[0] == 200


async def test_a_workers_own_key_is_sent_to_it_for_clients_that_showed_one_of_ours(tmp_path: Path) -> None:
    key_file, keys = tmp_path / "key", tmp_path / "keys"
    key_file.write_text("worker-key\n")
    keys.write_text("our-key\n")
    worker = ScriptedWorker("a")
    await worker.start()
    workers = {"workers": [{"name": "a", "url": worker.url, "adapter": "vllm", "api_key_file": key_file}]}
    tenants = {"tenants": {"acme": {"api_keys_file": str(keys)}}}
    async with running(worker, **workers, **tenants) as gateway, client_of(gateway) as client:
        assert (await client.post(token_body(), Authorization="Bearer clients-own"))[0] == 401
        assert (await client.post(token_body(), Authorization="Bearer our-key"))[0] == 200
        assert [seen.header(b"authorization") for seen in worker.requests] == [b"Bearer worker-key"]
        assert "worker-key" not in str(await client.admin("GET", "/admin/workers"))


@pytest.mark.covers("RC-17")
async def test_no_prompt_key_or_token_is_written_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "receipts.jsonl"
    canaries = ["CANARYTEXT", "CANARYKEY", "CANARYSALT", "987654321", "CANARYTOOL"]

    def fail(exchange: Exchange) -> None:
        exchange.respond(500, (), exchange.body)

    workers = [ScriptedWorker("a"), ScriptedWorker("b", fail)]
    async with running(*workers, receipts__path=file) as gateway, client_of(gateway) as client:
        key = {"Authorization": "Bearer CANARYKEY"}
        message = {"role": "user", "content": "CANARYTEXT"}
        for _ in range(4):
            await client.post(
                {"model": "m", "messages": [message], "tools": ["CANARYTOOL"]}, "/v1/chat/completions", **key
            )
            await client.post({"model": "m", "prompt": "CANARYTEXT", "cache_salt": "CANARYSALT"}, **key)
            await client.post({"model": "m", "prompt": [987654321] * 64}, **key)
        await client.post({"prompt": [987654321, "CANARYTEXT"]}, **key)
        seen = [await client.admin("GET", path) for path in ("/metrics", "/admin/status", "/admin/receipts")]
        await until(lambda: gauges_are_zero(gateway))
    written = file.read_text() + caplog.text + str(seen)
    assert len(file.read_text().splitlines()) == 13
    assert [canary for canary in canaries if canary in written] == []
