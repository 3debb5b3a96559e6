"""Streams whose worker is lost in the middle, with `retry.migrate`: over HTTP, to mock and to scripted workers."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrelay.core.model.units import FallbackReason, Fault, Status
from kvrelay.core.routing.status import TargetStatus
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.http.server import Exchange
from kvrelay.edge.worker.launch import MockFleet
from tests.edge.gateway.mocks import fault, fleet_of, heal
from tests.edge.gateway.scripted import (
    EVENT_STREAM,
    JSON,
    ScriptedWorker,
    breaks,
    chunk,
    client_of,
    gauges_are_zero,
    receipts,
    running,
    streams,
    token_body,
    until,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 24
PROMPT = [(7 * number) % 1000 + 300 for number in range(64)]
MESSAGES = [{"role": "system", "content": "Answer in verse."}, {"role": "user", "content": "Who lives in the sea?"}]
DONE = b"data: [DONE]\n\n"


def migrating(
    count: int, *, decode_ms: float = 1.0, **flags: object
) -> AbstractAsyncContextManager[tuple[MockFleet, Gateway]]:
    """Workers that are taken in turn, and streams that go on at another one."""
    given = {"gateway__policy": "round_robin", "retry__migrate": True, "retry__attempts": count, **flags}
    return fleet_of(count, decode_ms=decode_ms, **given)


async def stream_of(url: str, path: str, body: dict[str, Any]) -> list[bytes]:
    """The events of a stream; what its client gets, without the mark of the worker that sent the last of them."""
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        assert response.status == 200
        return [event for event in (await response.read()).split(b"\n\n") if event]


def read(event: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(event.removeprefix(b"data: "))
    return found


def unmarked(events: list[bytes]) -> list[Any]:
    """What any two runs have in common."""
    assert events[-1] == b"data: [DONE]" and b"data: [DONE]" not in events[:-1]
    chunks = [read(event) for event in events[:-1]]
    assert len({(each["id"], each["created"], each["model"]) for each in chunks}) == 1
    for each in chunks:
        for name in ("id", "created", "kvrelay_mock"):
            each.pop(name, None)
        if each.get("usage") is not None:
            each["usage"].pop("prompt_tokens_details")
    return chunks


SHAPES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": TOKENS}),
    (COMPLETIONS, {"prompt": [PROMPT], "max_tokens": TOKENS, "stop": []}),
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": TOKENS}),
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": TOKENS, "stop": ["never said"]}),
    (COMPLETIONS, {"prompt": "Once upon a time"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": TOKENS}),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": TOKENS}),
    (CHAT, {"messages": MESSAGES}),
    (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": "Fish"}], "max_tokens": TOKENS}),
]


async def migrated(gateway: Gateway, path: str, body: dict[str, Any]) -> list[bytes]:
    """Asks until the turn was at the worker that breaks; every answer counts."""
    whole = None
    for _ in range(4):
        seen = len(receipts(gateway))
        events = await stream_of(gateway.url, path, body)
        await until(lambda seen=seen: len(receipts(gateway)) > seen)  # type: ignore[misc]
        if receipts(gateway)[0].migrations:
            return events
        assert whole is None or unmarked(whole) == unmarked(events)
        whole = events
    raise AssertionError("nothing was migrated")


@pytest.mark.covers("RT-23", "RC-11", "RC-13", "S30")
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}], ids=["uncounted", "counted"])
async def test_a_broken_stream_goes_on_as_if_nothing_had_been(options: dict[str, object]) -> None:
    async with migrating(2, gateway__timeouts__idle_s=0.3, health__failures=1000) as (fleet, gateway):
        first, second = fleet.workers
        for path, shape in SHAPES:
            body = {**shape, **options, "stream": True}
            direct = await stream_of(second.url, path, {**body, "stream_options": {"include_usage": True}})
            counts = read(direct[-2])["usage"]
            await fault(first.url, kind="hang", after_chunks=5)
            got = await migrated(gateway, path, body)
            await heal(first.url)
            assert unmarked(got) == unmarked(direct if options else [*direct[:-2], direct[-1]]), (path, shape)
            receipt = receipts(gateway)[0]
            assert (receipt.status, receipt.migrations, receipt.not_migrated_because) == (Status.OK, 1, None)
            assert (receipt.chosen_worker, receipt.fallback_reason) == ("m1", FallbackReason.MIGRATED)
            assert [(each.worker, each.fault, each.continued) for each in receipt.attempts] == [
                ("m0", Fault.IDLE_TIMEOUT, False),
                ("m1", None, True),
            ]
            assert receipt.prompt_tokens == counts["prompt_tokens"]
            assert receipt.completion_tokens == counts["completion_tokens"]
            assert max(receipt.itl_ms) > 200, "the client saw the gap"


@pytest.mark.covers("RT-23", "S27")
async def test_a_worker_that_dies_in_the_middle_is_not_noticed_by_any_of_its_clients() -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}
    async with migrating(3, decode_ms=8.0) as (fleet, gateway):
        whole = unmarked(await stream_of(fleet.workers[1].url, COMPLETIONS, body))
        asked = [asyncio.ensure_future(stream_of(gateway.url, COMPLETIONS, body)) for _ in range(12)]
        await until(lambda: all(_all_decode(worker.targets[0], 4) for worker in gateway.status().workers))
        fleet.kill("m0")
        for events in await asyncio.gather(*asked):
            assert unmarked(events) == whole
        moved = [receipt for receipt in receipts(gateway) if receipt.migrations]
        assert len(moved) == 4 and {receipt.status for receipt in receipts(gateway)} == {Status.OK}
        assert {receipt.chosen_worker for receipt in moved} <= {"m1", "m2"}


def _all_decode(target: TargetStatus, requests: int) -> bool:
    return target.active_requests == requests and target.active_prefill_tokens == 0


@pytest.mark.covers("RT-23")
async def test_without_the_setting_the_same_loss_breaks_the_stream() -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
    async with migrating(2, retry__migrate=False) as (fleet, gateway):
        await fault(fleet.workers[0].url, kind="die_after_chunks", chunks=5)
        with pytest.raises(aiohttp.ClientPayloadError):
            for _ in range(2):
                await stream_of(gateway.url, COMPLETIONS, body)
        receipt = receipts(gateway)[0]
        assert (receipt.status, receipt.migrations, receipt.not_migrated_because) == (Status.WORKER_LOST, 0, None)


@pytest.mark.covers("RT-23")
async def test_a_stream_can_lose_its_worker_more_than_once() -> None:
    body = {"prompt": "Once upon", "max_tokens": 40, "stream": True}
    flags = {"gateway__timeouts__idle_s": 0.3, "health__failures": 1000}
    async with migrating(3, **flags) as (fleet, gateway):
        whole = unmarked(await stream_of(fleet.workers[2].url, COMPLETIONS, body))
        for _ in range(3):
            for worker in fleet.workers[:2]:
                await heal(worker.url)
                await fault(worker.url, kind="hang", after_chunks=5)
            assert unmarked(await stream_of(gateway.url, COMPLETIONS, body)) == whole
            await until(lambda: gauges_are_zero(gateway))
        assert max(receipt.migrations for receipt in receipts(gateway)) == 2


# --- scripted workers ------------------------------------------------------------------------------------------------


def piece(text: str, *ids: int, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": list(ids)}
    return b"data: " + msgspec.json.encode({"id": "x", "created": 1, "model": "m", "choices": [choice]}) + b"\n\n"


def seen(text: str, finish: str | None = None) -> bytes:
    """The piece as a client gets it that did not ask for ids."""
    return piece(text, finish=finish).replace(b'"token_ids":[]', b'"token_ids":null')


ENDS = streams(piece("c", 9, finish="stop"), DONE)
WHOLE = seen("a") + seen("b") + seen("c", finish="stop") + DONE
IN_STREAM_ERROR = b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'


@pytest.mark.covers("RT-23")
@pytest.mark.parametrize(
    ("first", "fault"),
    [
        (breaks(piece("a", 7), piece("b", 8)), Fault.RESET),
        (breaks(piece("a", 7), piece("b", 8), piece("c", 9)[:25]), Fault.RESET),
        (streams(piece("a", 7), piece("b", 8)), Fault.RESET),
        (streams(piece("a", 7), piece("b", 8), IN_STREAM_ERROR, DONE), Fault.SERVER_ERROR),
        (streams(piece("a", 7), piece("b", 8), piece("", finish="abort"), DONE), Fault.SERVER_ERROR),
    ],
    ids=["reset", "reset inside an event", "an end without [DONE]", "an error event", "aborted"],
)
async def test_whatever_a_worker_is_lost_by_the_next_one_goes_on(first: Any, fault: Fault) -> None:
    workers = [ScriptedWorker("a", first), ScriptedWorker("b", ENDS)]
    async with running(*workers, gateway__policy="round_robin", retry__migrate=True) as gateway:
        async with client_of(gateway) as client:
            status, body, headers = await client.post(token_body(stream=True, max_tokens=5))
        assert (status, body, headers["x-kvrelay-worker"]) == (200, WHOLE, "a")
        sent = msgspec.json.decode(workers[1].requests[0].body)
        assert (sent["prompt"][-3:], sent["max_tokens"]) == ([139, 7, 8], 3)
        (receipt,) = receipts(gateway)
        assert (receipt.attempts[0].fault, receipt.chosen_worker, receipt.migrations) == (fault, "b", 1)
        assert receipt.http_status == 200 and receipt.status is Status.OK
        await until(lambda: gauges_are_zero(gateway))


async def test_an_error_event_before_any_text_is_retried_like_any_failure() -> None:
    workers = [ScriptedWorker("a", streams(IN_STREAM_ERROR, DONE)), ScriptedWorker("b", ENDS)]
    async with running(*workers, gateway__policy="round_robin", retry__migrate=True) as gateway:
        async with client_of(gateway) as client:
            status, body, headers = await client.post(token_body(stream=True, max_tokens=5))
        assert (status, body, headers["x-kvrelay-worker"]) == (200, seen("c", finish="stop") + DONE, "b")
        assert receipts(gateway)[0].fallback_reason is FallbackReason.RETRIED_ELSEWHERE


async def test_a_stream_that_lacks_only_the_end_of_its_body_is_complete() -> None:
    worker = ScriptedWorker("a", breaks(chunk("one"), DONE))
    async with running(worker) as gateway, client_of(gateway) as client:
        status, body, _ = await client.post(token_body(stream=True))
        assert (status, body) == (200, chunk("one") + DONE)
        assert receipts(gateway)[0].status is Status.OK


@pytest.mark.covers("RT-23")
@pytest.mark.parametrize("lost", [breaks, streams], ids=["reset", "an error event"])
async def test_a_stream_whose_worker_is_lost_behind_the_whole_answer_is_ended_for_it(lost: Any) -> None:
    more = () if lost is breaks else (IN_STREAM_ERROR,)
    workers = [
        ScriptedWorker("a", lost(piece("a", 7), piece("b", 8, finish="length"), *more)),
        ScriptedWorker("b", ENDS),
    ]
    async with running(*workers, gateway__policy="round_robin", retry__migrate=True) as gateway:
        async with client_of(gateway) as client:
            status, body, _ = await client.post(token_body(stream=True, max_tokens=2))
        assert (status, body) == (200, seen("a") + seen("b", finish="length") + DONE)
        assert workers[1].requests == []
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.migrations, receipt.completion_tokens) == (Status.OK, 0, 2)
        await until(lambda: gauges_are_zero(gateway))


async def test_counts_that_its_client_asked_for_and_nobody_knows_leave_such_a_stream_broken() -> None:
    worker = ScriptedWorker("a", breaks(piece("a", 7, finish="length")))
    async with running(worker, retry__migrate=True) as gateway, client_of(gateway) as client:
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.post(token_body(stream=True, max_tokens=1, stream_options={"include_usage": True}))
        assert receipts(gateway)[0].not_migrated_because == "nothing_left"


@pytest.mark.covers("RT-23", "RC-13")
@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (lambda exchange: exchange.respond(400, (JSON,), b'{"error": "what is this"}'), Fault.NOT_CONTINUED),
        (lambda exchange: exchange.respond(200, (JSON,), b"{}"), Fault.NOT_CONTINUED),
        (lambda exchange: exchange.respond(503, (JSON,), b"{}"), Fault.BACK_PRESSURE),
        (lambda exchange: exchange.respond(500, (JSON,), b"{}"), Fault.SERVER_ERROR),
        (lambda exchange: exchange.abort(), Fault.RESET),
    ],
    ids=["400", "no stream", "503", "500", "closed"],
)
async def test_where_nobody_takes_it_up_the_client_sees_a_broken_stream(second: Any, fault: Fault) -> None:
    workers = [ScriptedWorker("a", breaks(piece("a", 7), piece("b", 8))), ScriptedWorker("b", second)]
    async with running(*workers, gateway__policy="round_robin", retry__migrate=True) as gateway:
        received = b""
        with pytest.raises(aiohttp.ClientPayloadError):
            async with aiohttp.ClientSession() as session:
                body = token_body(stream=True, max_tokens=5)
                async with session.post(gateway.url + COMPLETIONS, json=body) as response:
                    async for data in response.content.iter_any():
                        received += data
        assert received == seen("a") + seen("b")
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.attempts[1].fault) == (Status.WORKER_LOST, fault)
        assert receipt.not_migrated_because in ("not_continued", "all_tried")
        await until(lambda: gauges_are_zero(gateway))
        gateway.router.check()


@pytest.mark.covers("RT-23", "RC-13")
@pytest.mark.parametrize(
    ("members", "because"),
    [({"n": 2}, "several_choices"), ({"logprobs": 1}, "logprobs"), ({"echo": True}, "echo")],
)
async def test_what_cannot_be_continued_breaks_and_nobody_else_is_asked(members: dict[str, Any], because: str) -> None:
    workers = [ScriptedWorker("a", breaks(piece("a", 7))), ScriptedWorker("b", ENDS)]
    async with running(*workers, gateway__policy="round_robin", retry__migrate=True) as gateway:
        async with client_of(gateway) as client:
            with pytest.raises(aiohttp.ClientPayloadError):
                await client.post(token_body(stream=True, **members))
        assert workers[1].requests == []
        assert receipts(gateway)[0].not_migrated_because == because


async def test_a_client_that_reads_slowly_slows_the_next_worker_down_as_well() -> None:
    flow: list[bool] = []
    filler = b": " + b"x" * 65536 + b"\n\n"

    def floods_and_breaks(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        exchange.write(piece("a", 7))
        for _ in range(100):
            exchange.write(filler)
        exchange.abort()

    def floods(exchange: Exchange) -> None:
        exchange.on_flow = flow.append
        exchange.start(200, (EVENT_STREAM,))
        for _ in range(400):
            exchange.write(filler)
        exchange.write(piece("b", 8, finish="stop") + DONE)
        exchange.finish()

    workers = [ScriptedWorker("a", floods_and_breaks), ScriptedWorker("b", floods)]
    async with running(*workers, gateway__policy="round_robin", retry__migrate=True) as gateway:
        async with aiohttp.ClientSession() as session:
            body = token_body(stream=True, max_tokens=5)
            async with session.post(gateway.url + COMPLETIONS, json=body) as response:
                await asyncio.sleep(0.5)
                assert True not in flow
                received = await response.read()
        assert received.endswith(seen("b", finish="stop") + DONE)
        assert receipts(gateway)[0].migrations in (0, 1)


@pytest.mark.covers("RT-23")
@pytest.mark.parametrize("migrate", [True, False])
async def test_a_stream_that_hangs_in_the_shutdown_of_its_worker_is_not_waited_for(
    migrate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.edge.gateway.request.PATIENCE_WITH_GONE_S", 0.3)

    def begins_and_hangs(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        exchange.write(piece("a", 7) + piece("b", 8))
        workers[0].healthy = False

    workers = [ScriptedWorker("a", begins_and_hangs), ScriptedWorker("b", ENDS)]
    async with running(*workers, gateway__policy="round_robin", retry__migrate=migrate) as gateway:
        async with asyncio.timeout(20), client_of(gateway) as client:
            if migrate:
                assert (await client.post(token_body(stream=True, max_tokens=5)))[1] == WHOLE
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await client.post(token_body(stream=True, max_tokens=5))
        assert receipts(gateway)[0].attempts[0].fault is Fault.IDLE_TIMEOUT


async def test_a_worker_that_ends_in_good_order_may_end_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.edge.gateway.request.PATIENCE_WITH_GONE_S", 5.0)
    ended = asyncio.Event()

    def goes_on(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        worker.healthy = False
        tick(exchange)

    def tick(exchange: Exchange) -> None:
        if ended.is_set():
            exchange.write(DONE)
            exchange.finish()
        else:
            exchange.write(piece("a", 7))
            asyncio.get_running_loop().call_later(0.05, tick, exchange)

    worker = ScriptedWorker("a", goes_on)
    async with running(worker) as gateway, client_of(gateway) as client:
        asked = asyncio.ensure_future(client.post(token_body(stream=True, max_tokens=5)))
        await until(lambda: gateway.status().workers[0].standing == "dead")
        await asyncio.sleep(0.3)
        ended.set()
        assert (await asked)[1].endswith(DONE)
        assert receipts(gateway)[0].status is Status.OK
