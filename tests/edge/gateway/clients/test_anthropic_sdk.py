"""Anthropic's own Python client cannot tell whether a gateway is between it and the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from kvrelay.core.model.units import Status
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.worker.launch import RunningWorker
from tests.edge.gateway.clients.seen import SAME_ID, refused, same_through, same_through_async
from tests.edge.gateway.direct import ask, post
from tests.edge.gateway.scripted import JSON, ScriptedWorker, receipts, running

MODEL = "mock-model"
TURNS: list[Any] = [{"role": "user", "content": "Grüß Gott \N{WAVE DASH}"}]
TOOLS: list[Any] = [
    {"name": name, "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}}}
    for name in ("look", "go")
]
MUST: dict[str, Any] = {"type": "any"}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}


@contextmanager
def client_of(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="k", max_retries=0, default_headers=SAME_ID, timeout=20.0) as client:
        yield client


def _ask(client: Anthropic, **body: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 100, "messages": TURNS, **body})


def message(client: Anthropic) -> Any:
    return [_ask(client, system="Be kind."), _ask(client, model="ad-x", max_tokens=3)]


def message_with_an_image(client: Anthropic) -> Any:
    return _ask(client, messages=[{"role": "user", "content": [IMAGE, {"type": "text", "text": "look"}]}])


def message_with_a_tool(client: Anthropic) -> Any:
    first = _ask(client, tools=TOOLS, tool_choice={"type": "tool", "name": "go"})
    (use,) = first.content
    assert use.type == "tool_use" and use.name == "go" and list(use.input) == ["where"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*TURNS, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return [first, _ask(client, messages=turns, tools=TOOLS)]


def streamed(client: Anthropic) -> Any:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=TURNS) as stream:
        events = list(stream)
        return [events, stream.get_final_message(), stream.get_final_text()]


def streamed_with_a_tool(client: Anthropic) -> Any:
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=TURNS, tools=TOOLS, tool_choice={"type": "any"}
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    return [events, final]


def raw_events(client: Anthropic) -> Any:
    return list(_ask(client, stream=True))


def counted(client: Anthropic) -> Any:
    tokens = client.messages.count_tokens(model=MODEL, messages=TURNS, tools=TOOLS).input_tokens
    assert tokens > client.messages.count_tokens(model=MODEL, messages=TURNS).input_tokens > 0
    return tokens


TALKS = (message, message_with_an_image, message_with_a_tool, streamed, streamed_with_a_tool, raw_events, counted)


UNSCORED = {"message_with_an_image": "multimodal_input", "counted": "path_not_scored"}


@pytest.mark.covers("S20")
@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.__name__)
async def test_the_sync_client(worker: RunningWorker, gateway: Gateway, talk: Callable[[Anthropic], Any]) -> None:
    def led(url: str) -> Any:
        with client_of(url) as client:
            return talk(client)

    assert await same_through(worker, gateway, led)
    for receipt in receipts(gateway):
        assert receipt.status is Status.OK
        assert receipt.unscored_because == UNSCORED.get(talk.__name__)
        if talk is not counted:
            assert receipt.actual_cached_tokens is not None and receipt.completion_tokens


@pytest.mark.covers("S19", "S20", "S21")
async def test_a_conversation_is_matched_with_what_the_worker_holds(gateway: Gateway) -> None:
    """Tools, what they brought and texts in parts are rendered as the worker renders them: claims come true."""
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What will the weather be like? " * 9}]}]
    with client_of(gateway.url) as client:
        for _ in range(4):
            answer = await asyncio.to_thread(
                _ask, client, system="Be kind.", messages=turns, tools=TOOLS, tool_choice=MUST
            )
            (use,) = answer.content
            result = {"type": "tool_result", "tool_use_id": use.id, "content": f"sunny, as {use.input} was"}
            more = [{"type": "text", "text": "and"}, {"type": "text", "text": "tomorrow?"}]
            turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result, *more]}]
            (latest,) = gateway.receipts.recent(1)
            assert latest.unscored_because is None
            counts = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
            assert latest.prompt_tokens == counts
    claims = [(each.matched_tokens_at_route, each.actual_cached_tokens) for each in reversed(receipts(gateway))]
    assert all(abs((claimed or 0) - actual) <= 16 for claimed, actual in claims if actual is not None)
    assert len(claims) == 4 and claims[-1][1]


async def test_many_talks_of_the_async_client_at_once(worker: RunningWorker, gateway: Gateway) -> None:
    async def led(url: str) -> Any:
        async with AsyncAnthropic(base_url=url, api_key="k", max_retries=0, timeout=20.0) as client:
            return await asyncio.gather(*(_async_talk(client, number) for number in range(6)))

    said = await same_through_async(worker, gateway, led)
    assert len({text for text, _ in said}) == 6
    assert {receipt.status for receipt in receipts(gateway)} == {Status.OK}


async def _async_talk(client: AsyncAnthropic, number: int) -> list[Any]:
    """Only what was said: how busy the worker was shows in its counts."""
    turns: Any = [{"role": "user", "content": f"turn of {number}"}]
    async with client.messages.stream(model=MODEL, max_tokens=100, messages=turns) as stream:
        text = "".join([piece async for piece in stream.text_stream])
    turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    answer = await client.messages.create(
        model=MODEL, max_tokens=100, messages=turns, tools=TOOLS, tool_choice={"type": "any"}
    )
    (use,) = answer.content
    return [text, use.input if use.type == "tool_use" else None]


REFUSALS: dict[str, tuple[type[anthropic.APIStatusError], dict[str, Any]]] = {
    "no such model": (anthropic.NotFoundError, {"model": "none"}),
    "no such model, streamed": (anthropic.NotFoundError, {"model": "none", "stream": True}),
    "no messages": (anthropic.BadRequestError, {"messages": []}),
    "no tools": (anthropic.BadRequestError, {"tool_choice": MUST}),
    "too many tokens": (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "x" * 40_000}]}),
}


@pytest.mark.covers("S28")
@pytest.mark.parametrize("case", REFUSALS)
async def test_refusals_raise_the_same_errors(worker: RunningWorker, gateway: Gateway, case: str) -> None:
    expected, body = REFUSALS[case]

    def led(url: str) -> Any:
        with client_of(url) as client, pytest.raises(expected) as raised:
            _ask(client, **body)
        return refused(raised.value)

    await same_through(worker, gateway, led)
    assert {receipt.status for receipt in receipts(gateway)} == {Status.CLIENT_ERROR}


@pytest.mark.covers("S28")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_fails_raises_the_same_error(worker: RunningWorker, gateway: Gateway, stream: bool) -> None:
    await ask(worker.url, post("/mock/faults", {"kind": "500"}))

    def led(url: str) -> Any:
        with client_of(url) as client, pytest.raises(anthropic.InternalServerError) as raised:
            _ask(client, stream=stream)
        return refused(raised.value)

    await same_through(worker, gateway, led)


async def test_a_key_in_x_api_key_is_the_clients_credential(tmp_path: Path) -> None:
    """With keys of the gateway's own it is checked and goes no further; without, it belongs to the worker."""
    keys = tmp_path / "keys"
    keys.write_text("ours\n")
    worker = ScriptedWorker("a", lambda exchange: exchange.respond(200, (JSON,), b"{}"))
    request = {"model": "m", "max_tokens": 1, "messages": []}
    async with running(worker, tenants={"acme": {"api_keys_file": str(keys)}}) as gateway:
        for key, status in (("ours", 200), ("theirs", 401)):
            assert (await ask(gateway.url, post("/v1/messages", request, ("x-api-key", key)))).status == status
        named = post("/v1/messages", request, ("X-Api-Key", "ours"), ("Connection", "x-api-key, keep-alive"))
        assert (await ask(gateway.url, named)).status == 200
        assert [seen.header(b"x-api-key") for seen in worker.requests] == [None, None]
        assert {receipt.tenant for receipt in receipts(gateway)} == {"acme"}
    worker.requests.clear()
    async with running(worker) as gateway:
        assert (await ask(gateway.url, post("/v1/messages", request, ("x-api-key", "theirs")))).status == 200
        assert [seen.header(b"x-api-key") for seen in worker.requests] == [b"theirs"]
