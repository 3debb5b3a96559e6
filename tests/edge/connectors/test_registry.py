"""What a worker is, asked of the worker itself."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.connectors.openai import GUESSED_BLOCK_TOKENS
from kvrelay.edge.connectors.registry import CONNECTORS, detect

MODELS = '{"data": [{"id": "m"}, {"id": "ad1", "parent": "m"}]}'


@asynccontextmanager
async def serving(pages: dict[str, str], headers: dict[str, str] | None = None) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        if request.path not in pages:
            return web.Response(status=404)
        return web.Response(text=pages[request.path], headers=headers)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize(
    ("pages", "headers", "engine"),
    [
        ({"/v1/models": MODELS, "/metrics": "vllm:num_requests_running 0\n"}, {}, "vllm"),
        ({"/v1/models": MODELS, "/metrics": "sglang:num_running_reqs 0\n"}, {}, "sglang"),
        ({"/v1/models": MODELS, "/metrics": "llamacpp:requests_processing 0\n"}, {}, "llamacpp"),
        ({"/v1/models": '{"data": [{"id": "m", "owned_by": "sglang"}]}'}, {}, "sglang"),
        ({"/v1/models": '{"data": [{"id": "m", "owned_by": 7}]}'}, {}, "openai"),
        ({"/v1/models": "[]"}, {}, "openai"),
        ({"/v1/models": MODELS, "/metrics": "other:requests 0\n"}, {}, "openai"),
        ({"/v1/models": MODELS}, {}, "openai"),
        ({"/v1/models": MODELS, "/metrics": "vllm:x 0\n"}, {"x-kvrelay-mock": "1"}, "mock"),
    ],
)
async def test_the_engine_is_recognised(pages: dict[str, str], headers: dict[str, str], engine: str) -> None:
    async with serving(pages, headers) as url, aiohttp.ClientSession() as session:
        assert (await detect(session, url, {})).name == engine


async def test_a_server_without_models_is_no_worker() -> None:
    async with serving({}) as url, aiohttp.ClientSession() as session:
        with pytest.raises(WorkerAnswerUnusable, match="/v1/models answered 404"):
            await detect(session, url, {})


async def test_any_openai_server_is_described_without_events() -> None:
    async with serving({"/v1/models": MODELS}) as url, aiohttp.ClientSession() as session:
        description = await CONNECTORS["openai"].describe(session, url, {})
        spec = description.spec
        assert (spec.models, spec.adapters, spec.block_size_tokens) == (("m",), ("ad1",), GUESSED_BLOCK_TOKENS)
        assert (spec.sends_events, description.sources, description.incarnation) == (False, (), None)
        assert await CONNECTORS["openai"].probe(session, url, {}) is None
        assert await CONNECTORS["openai"].scrape(session, url, {}) is None


async def test_vllm_without_metrics_and_events_is_described_as_far_as_it_says() -> None:
    async with serving({"/v1/models": MODELS}) as url, aiohttp.ClientSession() as session:
        description = await CONNECTORS["vllm"].describe(session, url, {})
        assert (description.incarnation, description.version, description.sources) == (None, None, ())
        assert (description.spec.block_size_tokens, description.spec.sends_events) == (None, False)


@pytest.mark.parametrize("body", ["<html>", "[]", '{"data": 1}'])
async def test_an_answer_that_is_none_is_a_worlds_fault_and_no_crash(body: str) -> None:
    async with serving({"/v1/models": body}) as url, aiohttp.ClientSession() as session:
        with pytest.raises(WorkerAnswerUnusable, match="answered something else"):
            await CONNECTORS["vllm"].describe(session, url, {})


async def test_nobody_there_is_told_from_no_answer_in_time() -> None:
    async with serving({}) as url:
        pass
    async with aiohttp.ClientSession() as session:
        for refused in (url, url.replace("127.0.0.1", "localhost")):
            with pytest.raises(WorkerUnreachable, match="connection refused") as raised:
                await detect(session, refused, {})
            assert raised.value.refused


async def test_a_worker_that_hangs_is_late_and_not_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        url = f"http://127.0.0.1:{never_accepts.getsockname()[1]}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.1)) as session:
            with pytest.raises(WorkerUnreachable, match="no answer in time") as raised:
                await detect(session, url, {})
    assert not raised.value.refused
