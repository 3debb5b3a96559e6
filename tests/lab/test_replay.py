"""The replay client against one real mock worker, and against a server that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from kvrelay.core.stats.seen_before import SeenBefore
from kvrelay.core.traces.plan import Plan, Scale, make_plan
from kvrelay.core.traces.trace import SESSION_SCOPE, Session, Trace, Turn
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.replay.client import CompletionClient, completion_body
from kvrelay.lab.replay.replay import Arm, replay
from kvrelay.lab.replay.sample import Sample


def small_plan() -> Plan:
    def session(name: str) -> Session:
        turns = tuple(
            Turn(number * 10.0, 30.0, tuple(range(1, 9 + number)), 64 * (8 + number) + 9, 6) for number in range(3)
        )
        return Session(name, name, turns)

    return make_plan(Trace(64, SESSION_SCOPE, (session("a"), session("b"))), Scale(16), seed=3)


async def replayed(plan: Plan, url: str) -> list[Sample]:
    samples: list[Sample] = []
    async with CompletionClient(url, timeout_s=10.0) as client:
        await replay(plan, client, arm=Arm("none", 0), model="mock-model", on_sample=samples.append)
    return samples


async def test_turns_wait_for_the_answer_before_them_and_the_think_time() -> None:
    async with MockFleet([MockSpec(name="m", decode_ms=5.0)]) as fleet:
        samples = await replayed(small_plan(), fleet.workers[0].url)

    assert [sample.failure for sample in samples] == [None] * 6
    for name in "ab":
        own = [sample for sample in samples if sample.session_id == name]
        assert [sample.turn for sample in own] == [0, 1, 2]
        for before, after in pairwise(own):
            assert after.due_ms == pytest.approx(before.ended_ms + 30.0, abs=0.01)
            assert after.sent_ms >= after.due_ms
        assert all(sample.completion_tokens == 6 and len(sample.itl_ms) == 5 for sample in own)
        assert all(sample.ttft_ms is not None and sample.ttft_ms >= (sample.ttft_sent_ms or 0) for sample in own)


@pytest.mark.covers("BM-13")
async def test_engine_hits_exactly_what_the_trace_had_sent_before() -> None:
    """One worker with room for everything: its hits are the seen-before tokens, block for block."""
    plan = small_plan()
    async with MockFleet([MockSpec(name="m")]) as fleet:
        samples = await replayed(plan, fleet.workers[0].url)

    turns = {session.session_id: session.turns for session in plan.sessions}
    seen = SeenBefore(16)
    for sample in sorted(samples, key=lambda sample: sample.sent_ms):
        assert sample.cached_tokens == seen.take(turns[sample.session_id][sample.turn].token_ids)
    assert sum(sample.cached_tokens or 0 for sample in samples) == 2 * (8 + 9) * 16


async def scripted(answer: bytes) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHUNK = b'data: {"choices": [{"text": "x"}]}\n\n'


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}", "HTTP 503"),
        (HEAD + CHUNK, "the stream ended without [DONE]"),
        (HEAD + b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n', "an error event in the stream"),
        (HEAD + b"data: {nonsense\n\n", "DecodeError"),
        (b"", "ServerDisconnectedError"),
        (HEAD + CHUNK + b"data: [DONE]\n\n", None),
    ],
)
async def test_failures_are_kept_and_named(answer: bytes, failure: str | None) -> None:
    async for url in scripted(answer):
        async with CompletionClient(url, timeout_s=5.0) as client:
            body = completion_body("m", small_plan().sessions[0].turns[0].token_ids, 1)
            outcome = await client.complete(body, request_id="r", session_id="s")

        assert (failure or "") in (outcome.failure or ""), outcome.failure
        assert (outcome.failure is None) == (failure is None)
        assert outcome.ended_s >= outcome.sent_s
