"""What was loaded from the store, in receipts: the outcome that the worker's connector tells, not the plan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.http.server import Exchange, HttpServer, start_server
from tests.edge.gateway.scripted import (
    JSON,
    USAGE,
    ScriptedWorker,
    client_of,
    receipts,
    running,
    stream,
    token_body,
    until,
)

REPORT = {
    "outcome": "corrupt",
    "reason": "corrupt",
    "cached_tokens": 8,
    "loaded_tokens": 8,
    "planned_tokens": 16,
    "bytes_read": 4096,
    "ms": {"lookup": 0.5, "fetch": 3.25},
    "predicted_recompute_ms": 80.0,
    "contract_differs": ["kv_dtype"],
}


def answer_with_report(exchange: Exchange) -> None:
    body = {"choices": [{"text": "hi"}], "usage": USAGE, "kv_transfer_params": {"kvrelay": REPORT}}
    exchange.respond(200, (JSON,), msgspec.json.encode(body))


def is_of_report(receipt: Receipt) -> bool:
    assert receipt.actual_cached_tokens == 8, "the engine says 16, which is what was planned"
    assert (receipt.remote_outcome, receipt.remote_reason, receipt.remote_loaded_tokens) == ("corrupt", "corrupt", 8)
    assert receipt.remote_bytes_read == 4096
    assert receipt.remote_path_ms == {"lookup": 0.5, "fetch": 3.25, "predicted_recompute": 80.0}
    assert receipt.contract_differs == ("kv_dtype",)
    return True


@asynccontextmanager
async def report_port(asked: list[str], answer: bytes | None) -> AsyncIterator[str]:
    """A connector's port; `answer` None: it hangs."""

    def handle(exchange: Exchange) -> None:
        asked.append(exchange.path)
        if answer is not None:
            exchange.respond(200, (JSON,), answer)

    server: HttpServer = await start_server(handle, host="127.0.0.1", port=0)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


async def test_an_answer_that_is_not_streamed_brings_its_report() -> None:
    worker = ScriptedWorker("a", answer_with_report)
    async with running(worker) as gateway, client_of(gateway) as client:
        await client.post(token_body())
        assert is_of_report(receipts(gateway)[0])


async def test_the_report_of_a_stream_is_asked_for_by_the_requests_id() -> None:
    worker, asked = ScriptedWorker("a", stream), list[str]()
    await worker.start()
    async with report_port(asked, msgspec.json.encode(REPORT)) as url:
        entry = {"name": "a", "url": worker.url, "adapter": "vllm", "kv_report": url}
        async with running(worker, workers=[entry]) as gateway, client_of(gateway) as client:
            await client.post(token_body(stream=True), x_request_id="mine-1")
            await until(lambda: receipts(gateway))
            assert is_of_report(receipts(gateway)[0])
            assert asked == ["/loads/mine-1"]


@pytest.mark.parametrize("answer", [None, b"[]", b'{"outcome": 1}'])
async def test_a_port_that_hangs_or_talks_nonsense_costs_its_figures_only(answer: bytes | None) -> None:
    worker, asked = ScriptedWorker("a", stream), list[str]()
    await worker.start()
    async with report_port(asked, answer) as url:
        entry = {"name": "a", "url": worker.url, "adapter": "vllm", "kv_report": url}
        async with running(worker, workers=[entry]) as gateway, client_of(gateway) as client:
            status, body, _ = await client.post(token_body(stream=True))
            assert status == 200 and body.endswith(b"data: [DONE]\n\n")
            await until(lambda: receipts(gateway))
            (receipt,) = receipts(gateway)
            assert (receipt.actual_cached_tokens, receipt.remote_outcome) == (16, None)
            assert receipt.remote_bytes_read is None
            assert len(asked) == 1
