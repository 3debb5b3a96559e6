"""A traced gateway, its worker, and a collector that takes what comes over OTLP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.edge.gateway.scripted import ScriptedWorker, client_of, running, stream, token_body

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[Span]]]:
    spans: list[Span] = []

    async def take(request: web.Request) -> web.Response:
        batch = ExportTraceServiceRequest.FromString(await request.read())
        spans.extend(span for one in batch.resource_spans for scope in one.scope_spans for span in scope.spans)
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.add_routes([web.post("/v1/traces", take)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", spans
    finally:
        await runner.cleanup()


def sent_contexts(worker: ScriptedWorker) -> list[str]:
    return [
        value.decode()
        for exchange in worker.requests
        for name, value in exchange.headers
        if name.lower() == b"traceparent"
    ]


async def test_the_client_the_gateway_and_the_worker_are_one_trace() -> None:
    worker = ScriptedWorker("a", stream)
    async with collector() as (endpoint, spans):
        flags = {"tracing__endpoint": endpoint, "tracing__sample_ratio": 0.0}
        async with running(worker, **flags) as gateway, client_of(gateway) as client:
            await client.post(token_body(), traceparent=CONTEXT, x_session_id="s")
            await client.post(token_body())
        named = {span.name: span for span in spans}
        assert {span.trace_id.hex() for span in spans} == {CONTEXT[3:35]}
        root = named["text_completion m"]
        assert (root.parent_span_id.hex(), root.kind) == (CONTEXT[36:52], Span.SPAN_KIND_SERVER)
        attempt = named["attempt 1"]
        assert attempt.parent_span_id == root.span_id
        assert {"decide", "worker: to first token", "worker: generate"} <= named.keys()
        assert root.start_time_unix_nano <= attempt.start_time_unix_nano <= attempt.end_time_unix_nano
        text = {one.key: one.value.string_value for one in root.attributes}
        assert (text["gen_ai.operation.name"], text["gen_ai.conversation.id"]) == ("text_completion", "s")
    assert sent_contexts(worker) == [f"00-{CONTEXT[3:35]}-{attempt.span_id.hex()}-01"], "the second was not sampled"


async def test_without_tracing_a_context_passes_as_it_came() -> None:
    worker = ScriptedWorker("a")
    async with running(worker) as gateway, client_of(gateway) as client:
        await client.post(token_body(), traceparent=CONTEXT)
    assert sent_contexts(worker) == [CONTEXT]


@pytest.mark.filterwarnings("ignore")
async def test_a_collector_that_is_not_there_costs_no_request() -> None:
    flags = {"tracing__endpoint": "http://127.0.0.1:9/v1/traces", "tracing__sample_ratio": 1.0}
    async with running(ScriptedWorker("a"), **flags) as gateway, client_of(gateway) as client:
        assert [(await client.post(token_body()))[0] for _ in range(3)] == [200, 200, 200]
