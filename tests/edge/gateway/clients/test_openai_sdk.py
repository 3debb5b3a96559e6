"""OpenAI's own Python client cannot tell whether a gateway is between it and the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from kvrelay.core.model.units import Status
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.worker.launch import RunningWorker
from tests.edge.gateway.clients.seen import SAME_ID, refused, same_through, same_through_async
from tests.edge.gateway.direct import ask, post
from tests.edge.gateway.scripted import receipts, until

MODEL = "mock-model"
CHAT: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Grüß Gott \N{WAVE DASH}"}]
SCHEMA = {
    "type": "object",
    "properties": {"where": {"type": "string"}},
    "required": ["where"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": SCHEMA}} for name in ("look", "go")
]
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
GO: Any = {"type": "function", "function": {"name": "go"}}


class Where(BaseModel):
    where: str


@contextmanager
def client_of(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, default_headers=SAME_ID, timeout=20.0) as client:
        yield client


def chat_with_samples(client: OpenAI) -> Any:
    return client.chat.completions.create(model=MODEL, messages=CHAT, n=3, max_completion_tokens=7)


def chat_by_raw_response(client: OpenAI) -> Any:
    raw = client.chat.completions.with_raw_response.create(model="ad-x", messages=CHAT)
    return [raw.status_code, raw.headers["content-type"], raw.parse()]


def chat_with_a_tool(client: OpenAI) -> Any:
    first = client.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice="required")
    call = first.choices[0].message
    assert call.tool_calls
    result: Any = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}
    turns = [*CHAT, call.model_dump(exclude_none=True), result]
    return [first, client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS)]


def chat_parsed(client: OpenAI) -> Any:
    tool = openai.pydantic_function_tool(Where, name="where")
    answer = client.chat.completions.parse(model=MODEL, messages=CHAT, tools=[tool], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Where)
    return answer


def chat_streamed(client: OpenAI) -> Any:
    return [list(client.chat.completions.create(model=MODEL, messages=CHAT, stream=True, n=2))]


def chat_streamed_with_usage(client: OpenAI) -> Any:
    options: Any = {"include_usage": True}
    return [list(client.chat.completions.create(model=MODEL, messages=CHAT, stream=True, stream_options=options))]


def chat_streamed_with_a_tool(client: OpenAI) -> Any:
    with client.chat.completions.stream(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=GO) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.name == "go" and call.function.arguments.startswith('{"where": "')
    return [events, final]


def completions(client: OpenAI) -> Any:
    prompts: list[Any] = ["once", ["a", "b"], [300, 301, 302], [[300, 301], [302]]]
    return [client.completions.create(model=MODEL, prompt=prompt, max_tokens=5) for prompt in prompts]


def completion_streamed(client: OpenAI) -> Any:
    with client.completions.create(model=MODEL, prompt="once", max_tokens=9, stream=True) as stream:
        return list(stream)


def response(client: OpenAI) -> Any:
    turns: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    return [
        client.responses.create(model=MODEL, input="hello", instructions="Be kind."),
        client.responses.create(model=MODEL, input=turns, max_output_tokens=4),
    ]


def response_streamed(client: OpenAI) -> Any:
    with client.responses.stream(model=MODEL, input="hello") as stream:
        events = list(stream)
        return [events, stream.get_final_response(), stream.get_final_response().output_text]


def response_with_a_tool(client: OpenAI) -> Any:
    first = client.responses.create(model=MODEL, input="hello", tools=FLAT_TOOLS, tool_choice="required")
    (call,) = first.output
    assert call.type == "function_call" and call.name == "look"
    turns: Any = [
        {"role": "user", "content": "hello"},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    return [first, list(client.responses.create(model=MODEL, input=turns, tools=FLAT_TOOLS, stream=True))]


def embeddings(client: OpenAI) -> Any:
    said = client.embeddings.create(model=MODEL, input=["a", "b"], dimensions=5)
    assert len(said.data[1].embedding) == 5
    return [said, client.embeddings.create(model=MODEL, input=[1, 2, 3], encoding_format="float")]


def transcription(client: OpenAI) -> Any:
    sound = bytes(range(256)) * 700 + b"\r\n--x\r\n"
    said = client.audio.transcriptions.create(model=MODEL, file=("a.wav", sound), language="de")
    assert said.text.startswith(f"a.wav: {len(sound)} bytes")
    return said


def models(client: OpenAI) -> Any:
    return [model for model in client.models.list() if model.id]


TALKS = (
    chat_with_samples,
    chat_by_raw_response,
    chat_with_a_tool,
    chat_parsed,
    chat_streamed,
    chat_streamed_with_usage,
    chat_streamed_with_a_tool,
    completions,
    completion_streamed,
    response,
    response_streamed,
    response_with_a_tool,
    embeddings,
    transcription,
    models,
)


@pytest.mark.covers("S20", "S22", "S30")
@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.__name__)
async def test_the_sync_client(worker: RunningWorker, gateway: Gateway, talk: Callable[[OpenAI], Any]) -> None:
    def led(url: str) -> Any:
        with client_of(url) as client:
            return talk(client)

    assert await same_through(worker, gateway, led)
    assert {receipt.status for receipt in receipts(gateway)} == {Status.OK}


async def test_many_talks_of_the_async_client_at_once(worker: RunningWorker, gateway: Gateway) -> None:
    async def led(url: str) -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=20.0) as client:
            return await asyncio.gather(*(_async_talk(client, number) for number in range(6)))

    said = await same_through_async(worker, gateway, led)
    assert len({text for (text, *_) in said}) == 6
    assert {receipt.status for receipt in receipts(gateway)} == {Status.OK}


async def _async_talk(client: AsyncOpenAI, number: int) -> list[str]:
    """One conversation of three turns, by three APIs. Only the texts: how busy the worker was shows in its counts."""
    content = f"turn of {number}"
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], stream=True
    )
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    whole = await client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": content},
            {"role": "assistant", "content": streamed},
            {"role": "user", "content": "and?"},
        ],
    )
    async with client.responses.stream(model=MODEL, input=content) as events:
        final = await events.get_final_response()
    return [streamed, whole.choices[0].message.content or "", final.output_text]


def _ask(client: OpenAI, **body: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": CHAT, **body})


REFUSALS: dict[str, tuple[type[openai.APIStatusError], Callable[[OpenAI], Any]]] = {
    "no such model": (openai.NotFoundError, lambda client: _ask(client, model="none")),
    "no such model, streamed": (openai.NotFoundError, lambda client: _ask(client, model="none", stream=True)),
    "no messages": (openai.BadRequestError, lambda client: _ask(client, messages=[])),
    "no messages, streamed": (openai.BadRequestError, lambda client: _ask(client, messages=[], stream=True)),
    "no such tool": (openai.BadRequestError, lambda client: _ask(client, tools=TOOLS[:1], tool_choice=GO)),
    "not stored": (
        openai.NotFoundError,
        lambda client: client.responses.create(model=MODEL, input="a", previous_response_id="resp_1"),
    ),
    "no such path": (openai.NotFoundError, lambda client: client.files.list()),
    "no such response": (openai.NotFoundError, lambda client: client.responses.retrieve("resp_1")),
    "dimensions": (
        openai.BadRequestError,
        lambda client: client.embeddings.create(model=MODEL, input="a", dimensions=0),
    ),
}


@pytest.mark.covers("S28")
@pytest.mark.parametrize("case", REFUSALS)
async def test_refusals_raise_the_same_errors(worker: RunningWorker, gateway: Gateway, case: str) -> None:
    expected, talk = REFUSALS[case]

    def led(url: str) -> Any:
        with client_of(url) as client, pytest.raises(expected) as raised:
            talk(client)
        return refused(raised.value)

    await same_through(worker, gateway, led)
    assert {receipt.status for receipt in receipts(gateway)} == {Status.CLIENT_ERROR}


@pytest.mark.covers("S28")
@pytest.mark.parametrize(("kind", "expected"), [("429", openai.RateLimitError), ("503", openai.InternalServerError)])
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_of_the_worker_raise_the_same_errors(
    worker: RunningWorker, gateway: Gateway, kind: str, expected: type[openai.APIStatusError], stream: bool
) -> None:
    await ask(worker.url, post("/mock/faults", {"kind": kind, "retry_after_s": 7}))

    def led(url: str) -> Any:
        with client_of(url) as client, pytest.raises(expected) as raised:
            _ask(client, stream=stream)
        return refused(raised.value) | {"retry-after": raised.value.response.headers["retry-after"]}

    assert (await same_through(worker, gateway, led))["retry-after"] == "7"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_stops_reading_is_a_cancelled_request(
    worker: RunningWorker, gateway: Gateway, stream: bool
) -> None:
    def led(url: str) -> Any:
        with client_of(url) as client:
            if not stream:
                with pytest.raises(openai.APITimeoutError):
                    _ask(client.with_options(timeout=0.3), max_tokens=20_000)
                return None
            with client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=20_000, stream=True) as chunks:
                return next(iter(chunks))

    await same_through(worker, gateway, led)
    await until(lambda: receipts(gateway))
    assert [receipt.status for receipt in receipts(gateway)] == [Status.CLIENT_CANCELLED]
