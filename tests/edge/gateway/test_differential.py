"""Straight to a mock worker or through the gateway: a client cannot tell, but for the headers that the gateway adds."""

from __future__ import annotations

import asyncio
import gzip
import shutil
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from kvrelay.core.model.units import Status
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.direct import Answer, ask, assert_equal, both, get, masked, post
from tests.edge.gateway.mocks import gateway_over, heal
from tests.edge.gateway.scripted import receipts, until

SPEC = MockSpec(name="m0", adapters=("ad-x",), prefill_tokens_per_s=1e6, decode_ms=0.5, step_overhead_ms=0.0)
MODEL = "mock-model"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = 'Tell me of the sea, \N{WAVE DASH}\U0001f30a and of "quotes" and \\ and \n.'

PROMPTS: dict[str, Any] = {
    "text": TEXT,
    "texts": [TEXT, "another", "a third"],
    "ids": list(range(300, 420)),
    "lists of ids": [list(range(300, 420)), [5, 6, 7], list(range(300, 333))],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"stream_options": None},
    "off": {"stream_options": {"include_usage": False}},
    "on": {"stream_options": {"include_usage": True}},
}
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": TEXT}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "b"}]}],
    "image": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            ],
        }
    ],
}


@pytest.fixture(scope="module")
def worker() -> Iterator[RunningWorker]:
    with MockFleet([SPEC]) as fleet:
        yield fleet.workers[0]


@pytest_asyncio.fixture
async def gateway(worker: RunningWorker) -> AsyncIterator[Gateway]:
    async with gateway_over(worker) as gateway:
        yield gateway
    await heal(worker.url)


def prompts(shape: str) -> list[Any]:
    received = PROMPTS[shape]
    return received if shape in ("texts", "lists of ids") else [received]


async def compare(worker: RunningWorker, gateway: Gateway, request: bytes, *, warm: bool = True) -> Answer:
    """The answer, the same on both ways. `warm`: first let the worker's cache know the prompt, so that both hit it."""
    if warm:
        await ask(worker.url, request)
    direct, relayed = await both(worker.url, gateway.url, request)
    assert_equal(direct, relayed)
    return relayed


@pytest.mark.covers("S22", "S30")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", PROMPTS)
async def test_every_shape_of_prompt_streamed(
    worker: RunningWorker, gateway: Gateway, shape: str, options: str
) -> None:
    body = {"model": MODEL, "prompt": PROMPTS[shape], "max_tokens": 5, "stream": True, **OPTIONS[options]}
    answer = await compare(worker, gateway, post(COMPLETIONS, body))
    assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
    assert (b'"usage":{' in answer.body) is (options == "on")
    (receipt,) = receipts(gateway)
    assert receipt.actual_cached_tokens is not None and receipt.completion_tokens == 5 * len(prompts(shape))


@pytest.mark.covers("S22")
@pytest.mark.parametrize(
    "more", [{}, {"n": 2, "return_token_ids": True}, {"model": "ad-x"}, {"echo": False, "x": 1.50}]
)
@pytest.mark.parametrize("shape", PROMPTS)
async def test_every_shape_of_prompt_whole(
    worker: RunningWorker, gateway: Gateway, shape: str, more: dict[str, Any]
) -> None:
    body = {"model": MODEL, "prompt": PROMPTS[shape], "max_tokens": 5, **more}
    answer = await compare(worker, gateway, post(COMPLETIONS, body))
    assert answer.status == 200 and answer.framed_by_length
    (receipt,) = receipts(gateway)
    used = msgspec.json.decode(answer.body)["usage"]
    assert receipt.actual_cached_tokens == used["prompt_tokens_details"]["cached_tokens"]
    if shape == "lists of ids":
        assert receipt.prompt_tokens == used["prompt_tokens"] == 156


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", MESSAGES)
async def test_every_shape_of_chat_streamed(worker: RunningWorker, gateway: Gateway, shape: str, options: str) -> None:
    tools = [{"type": "function", "function": {"name": "stream_options", "parameters": {"type": "object"}}}]
    body = {"messages": MESSAGES[shape], "max_tokens": 4, "n": 2, "stream": True, "tools": tools, **OPTIONS[options]}
    answer = await compare(worker, gateway, post(CHAT, body))
    assert answer.status == 200
    (receipt,) = receipts(gateway)
    assert (receipt.unscored_because == "multimodal_input") is (shape == "image")
    assert receipt.actual_cached_tokens is not None


@pytest.mark.parametrize("shape", MESSAGES)
async def test_every_shape_of_chat_whole(worker: RunningWorker, gateway: Gateway, shape: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES[shape], "max_tokens": 4, "n": 2, "user": "u"}
    assert (await compare(worker, gateway, post(CHAT, body))).status == 200


REFUSED: dict[str, tuple[int, bytes]] = {
    "no JSON": (400, post(COMPLETIONS, b'{"prompt": [1, 2')),
    "no body": (400, post(COMPLETIONS, b"")),
    "wrong type": (400, post(COMPLETIONS, {"prompt": [1], "max_tokens": "many", "stream": True})),
    "no prompt": (400, post(COMPLETIONS, {"stream": True})),
    "wrong options": (400, post(COMPLETIONS, {"prompt": [1], "stream": True, "stream_options": "all"})),
    "null option": (400, post(COMPLETIONS, {"prompt": [1], "stream": True, "stream_options": {"include_usage": None}})),
    "n": (400, post(COMPLETIONS, {"prompt": [1], "n": 0, "stream": True})),
    "too long": (400, post(COMPLETIONS, {"prompt": [7] * 40_000, "stream": True})),
    "model": (404, post(COMPLETIONS, {"model": "none", "prompt": [1], "stream": True})),
    "content type": (400, post(COMPLETIONS, {"prompt": [1]}, ("content-type", "text/plain"))),
    "method": (405, get(COMPLETIONS)),
    "no messages": (400, post(CHAT, {"messages": [], "stream": True})),
    "out of vocabulary": (400, post(COMPLETIONS, {"prompt": [4_000_000]})),
    "out of vocabulary in a stream": (200, post(COMPLETIONS, {"prompt": [4_000_000], "stream": True})),
}


@pytest.mark.covers("S28")
@pytest.mark.parametrize("case", REFUSED)
async def test_the_workers_own_refusals(worker: RunningWorker, gateway: Gateway, case: str) -> None:
    status, request = REFUSED[case]
    answer = await compare(worker, gateway, request, warm=False)
    assert answer.status == status and answer.body
    assert all(worker.up for worker in gateway.status().workers)


@pytest.mark.covers("S28")
@pytest.mark.parametrize("kind", ["429", "503", "500"])
@pytest.mark.parametrize("stream", [True, False])
async def test_failures_of_the_only_worker_pass_with_their_body(
    worker: RunningWorker, gateway: Gateway, kind: str, stream: bool
) -> None:
    hint = {} if kind == "500" else {"retry_after_s": 7}
    await ask(worker.url, post("/mock/faults", {"kind": kind, **hint}))
    answer = await compare(worker, gateway, post(COMPLETIONS, {"prompt": [1, 2], "stream": stream}), warm=False)
    assert answer.status == int(kind) and msgspec.json.decode(answer.body)["error"]["code"] == int(kind)
    assert (dict(answer.headers).get(b"retry-after") == b"7") is (kind != "500")


FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n--b--\r\n'
OTHER: dict[str, tuple[int, bytes]] = {
    "models": (200, get("/v1/models")),
    "HEAD": (405, get("/v1/models", method="HEAD")),
    "OPTIONS": (405, get(COMPLETIONS, ("origin", "http://x"), method="OPTIONS")),
    "version": (200, get("/version")),
    "tokenize": (200, post("/tokenize", {"prompt": TEXT, "return_token_strs": True})),
    "tokenize a chat": (200, post("/tokenize", {"messages": MESSAGES["text"]})),
    "detokenize": (200, post("/detokenize", {"tokens": [72, 105]})),
    "unknown": (404, post("/v1/rerank?x=1&y=%2F", {"query": TEXT, "documents": [TEXT]})),
    "responses": (200, post("/v1/responses?x=1", {"input": [{"role": "user", "content": TEXT}]})),
    "responses, streamed": (200, post("/v1/responses", {"input": TEXT, "stream": True})),
    "responses, refused": (400, post("/v1/responses", {"input": [{"type": "reasoning"}]})),
    "messages": (
        200,
        post("/v1/messages?beta=true", {"model": MODEL, "max_tokens": 9, "messages": MESSAGES["text"][1:]}),
    ),
    "messages, refused": (400, post("/v1/messages", {"model": MODEL, "messages": MESSAGES["text"][1:]})),
    "count tokens": (200, post("/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES["text"][1:]})),
    "embeddings": (200, post("/v1/embeddings", {"input": [TEXT, "b"], "encoding_format": "base64"})),
    "compressed": (400, post(COMPLETIONS, gzip.compress(b'{"prompt": [1]}', mtime=0), ("content-encoding", "gzip"))),
    "HEAD, unknown": (404, get("/v9/nothing", method="HEAD")),
    "OPTIONS *": (404, get("*", method="OPTIONS")),
    "unknown, no body": (404, get("/v2//a/../b;c?d")),
    "DELETE": (404, get("/v1/files/1", method="DELETE")),
    "multipart": (200, post("/v1/audio/transcriptions", FORM, ("content-type", "multipart/form-data; boundary=b"))),
    "multipart, cut": (
        400,
        post("/v1/audio/transcriptions", FORM[:-9], ("content-type", "multipart/form-data; boundary=b")),
    ),
}


@pytest.mark.covers("S20")
@pytest.mark.parametrize("case", OTHER)
async def test_other_paths_and_methods(worker: RunningWorker, gateway: Gateway, case: str) -> None:
    status, request = OTHER[case]
    answer = await compare(worker, gateway, request)
    assert answer.status == status
    (receipt,) = receipts(gateway)
    unscored = ("path_not_scored", "no_body", "body_not_json", "compressed_body")
    assert receipt.unscored_because in ((None,) if case.startswith("messages") else unscored)


async def test_chunked_bodies_expectations_and_old_clients(worker: RunningWorker, gateway: Gateway) -> None:
    raw = msgspec.json.encode({"prompt": [1, 2, 3], "max_tokens": 3})
    chunks = b"%x\r\n%b\r\n%x;ext=1\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (10, raw[:10], len(raw) - 10, raw[10:])
    await compare(worker, gateway, post(COMPLETIONS, chunks, ("transfer-encoding", "chunked")))
    await compare(worker, gateway, post(COMPLETIONS, raw, ("expect", "100-continue")))
    old = post(COMPLETIONS, {"prompt": [1, 2, 3], "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    assert (await compare(worker, gateway, old)).body.endswith(b"data: [DONE]\n\n")


async def test_curl_and_aiohttp_see_the_same(worker: RunningWorker, gateway: Gateway) -> None:
    body = {"model": MODEL, "prompt": PROMPTS["ids"], "max_tokens": 6, "stream": True}
    raw = msgspec.json.encode(body).decode()
    by_curl = [await _curl(url + COMPLETIONS, raw) for url in (worker.url, worker.url, gateway.url)]
    assert by_curl[1][0] == by_curl[2][0] == 200
    by_aiohttp = []
    for url in (worker.url, gateway.url):
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + COMPLETIONS, json=body, headers={"x-request-id": "same"}) as response,
        ):
            by_aiohttp.append([line async for line in response.content])
    without_time = [[masked(line) for line in lines] for lines in by_aiohttp]
    assert without_time[0] == without_time[1]
    assert masked(by_curl[1][1]) == masked(by_curl[2][1]) == b"".join(without_time[0])


# A whole answer, a stream in pieces, a refusal, and a stream that is cancelled half way; connections are kept.
NODE = """
const url = process.argv[1], said = [];
const ask = (path, body, more = {}) => fetch(url + path, {
  method: "POST", body: JSON.stringify(body),
  headers: {"content-type": "application/json", "x-request-id": "same"}, ...more,
});
const prompt = Array.from({length: 120}, (_, i) => 300 + i);
for (const more of [{}, {stream: true}, {model: "none", stream: true}]) {
  const answer = await ask("/v1/completions", {prompt, max_tokens: 4, ...more});
  const pieces = [];
  for await (const piece of answer.body) pieces.push(Buffer.from(piece));
  said.push([answer.status, answer.headers.get("content-type"), Buffer.concat(pieces).toString("base64")]);
}
const leaving = new AbortController();
const cut = await ask("/v1/completions", {prompt, max_tokens: 4000, stream: true}, {signal: leaving.signal});
await cut.body.getReader().read();
leaving.abort();
const after = await fetch(url + "/v1/models");
said.push([cut.status, after.status, Buffer.from(await after.arrayBuffer()).toString("base64")]);
console.log(JSON.stringify(said));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node on this machine")
async def test_fetch_of_node_sees_the_same(worker: RunningWorker, gateway: Gateway) -> None:
    said = []
    for url in (worker.url, worker.url, gateway.url):
        status, out = await _output_of("node", "--input-type=module", "--eval", NODE, url)
        assert status == 0
        said.append([[*answer[:2], masked(b64decode(answer[2]))] for answer in msgspec.json.decode(out)])
    assert said[1] == said[2]
    assert [answer[0] for answer in said[2]] == [200, 200, 404, 200]
    await until(lambda: len(receipts(gateway)) == 5)
    assert [receipt.status for receipt in receipts(gateway)].count(Status.CLIENT_CANCELLED) == 1


async def _output_of(*command: str) -> tuple[int | None, bytes]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return process.returncode, out


async def _curl(url: str, body: str) -> tuple[int, bytes]:
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "-N", "--compressed", "-w", "%{stderr}%{http_code}", url, "-d", body),
        *("-H", "content-type: application/json", "-H", "x-request-id: same"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return int(err), out
