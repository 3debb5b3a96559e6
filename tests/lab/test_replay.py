"""The replay client against one real mock worker, and against a server that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from kvrelay.core.stats.seen_before import SeenBefore
from kvrelay.core.traces.plan import Plan, Scale, make_plan
from kvrelay.core.traces.trace import SESSION_SCOPE, Session, Trace, Turn
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.replay.client import CompletionClient, completion_body
from kvrelay.lab.replay.replay import Arm, replay
from kvrelay.lab.replay.request_body import Form
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sample_log import SampleLog, read_samples
from kvrelay.lab.replay.sending import sending, session_walls


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


@pytest.mark.parametrize("form", ["text", "chat"])
async def test_targets_without_token_ids_get_the_same_prompts_as_text(form: Form) -> None:
    samples: list[Sample] = []
    async with (
        MockFleet([MockSpec(name="m", blocks=20_000)]) as fleet,
        CompletionClient(fleet.workers[0].url + "/v1", timeout_s=10.0, form=form) as client,
    ):
        await replay(small_plan(), client, arm=Arm("none", 0), model="mock-model", on_sample=samples.append)

    assert [sample.failure for sample in samples] == [None] * 6
    assert all(sample.completion_tokens == 6 and sample.first_token_ms is not None for sample in samples)
    for name in "ab":
        grown = [sample.cached_tokens or 0 for sample in samples if sample.session_id == name]
        assert grown[0] < grown[1] < grown[2]


async def test_bare_workers_take_requests_in_turn() -> None:
    samples: list[Sample] = []
    async with MockFleet([MockSpec(name="m0"), MockSpec(name="m1")]) as fleet:
        urls = [worker.url for worker in fleet.workers]
        async with CompletionClient(*urls, timeout_s=10.0) as client:
            await replay(small_plan(), client, arm=Arm("none", 0), model="mock-model", on_sample=samples.append)

    in_sending_order = [sample.worker for sample in sorted(samples, key=lambda sample: sample.sent_ms)]
    assert in_sending_order == [*urls, *urls, *urls]


@pytest.mark.covers("S44")
async def test_a_cap_holds_requests_back_and_is_not_an_open_loop() -> None:
    """Twelve sessions at once; with two places the time in the queue has its own column and the run is marked."""
    turn = Turn(0.0, 0.0, (1, 2), 128, 4)
    together = tuple(Session(f"s{number}", f"s{number}", (turn,)) for number in range(12))
    plan = make_plan(Trace(64, SESSION_SCOPE, together), Scale(16), seed=3)
    samples: dict[int | None, list[Sample]] = {2: [], None: []}
    async with MockFleet([MockSpec(name="m", decode_ms=5.0)]) as fleet:
        for cap, own in samples.items():
            async with CompletionClient(fleet.workers[0].url, timeout_s=10.0) as client:
                await replay(
                    plan, client, arm=Arm("none", 0), model="mock-model", on_sample=own.append, max_in_flight=cap
                )

    capped, free = sending(samples[2], max_in_flight=2), sending(samples[None], max_in_flight=None)
    assert (capped.open_loop, capped.held_requests) == (False, 10)
    assert capped.why_not == "10 of 12 requests waited for one of 2 places in flight"
    assert (free.open_loop, free.held_requests, free.held_ms.count) == (True, 0, 0)
    for sample in samples[2]:
        assert sample.due_ms == sample.planned_ms == 0.0
        assert sample.first_token_ms is not None and sample.written_ms is not None
        assert 0.0 <= sample.held_ms <= sample.sent_ms <= sample.written_ms <= sample.first_token_ms <= sample.ended_ms
        assert sample.lateness_ms == pytest.approx(sample.held_ms + sample.skew_ms, abs=0.01)
        assert sample.ttft_ms == pytest.approx((sample.ttft_sent_ms or 0) + sample.lateness_ms, abs=0.01)
    for in_flight in (sum(other.sent_ms <= one.sent_ms < other.ended_ms for other in samples[2]) for one in samples[2]):
        assert in_flight <= 2


def chunk(**choice: object) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


def pausing(*parts: bytes | float) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]:
    """A server that writes the parts that are bytes and waits the parts that are seconds."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(part)
                await writer.drain()
        writer.close()

    return serve


@pytest.mark.covers("S43")
async def test_only_content_is_a_first_token() -> None:
    role, word = chunk(delta={"role": "assistant", "content": ""}), chunk(delta={"content": "x"})
    end, done = chunk(delta={}, finish_reason="stop"), b"data: [DONE]\n\n"
    answers = {
        "content": (HEAD, 0.01, role, 0.29, word, 0.02, word, end, done),
        "reasoning": (HEAD, role, 0.05, chunk(delta={"reasoning_content": "h"}), end, done),
        "tool": (HEAD, role, 0.05, chunk(delta={"tool_calls": [{"index": 0}]}), end, done),
        "nothing": (HEAD, 0.01, role, 0.05, end, done),
    }
    plan, samples = small_plan(), {}
    one_turn = msgspec.structs.replace(plan.sessions[0], turns=plan.sessions[0].turns[:1])
    for name, answer in answers.items():
        server = await asyncio.start_server(pausing(*answer), "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            got: list[Sample] = []
            async with CompletionClient(url, timeout_s=5.0, form="chat") as client:
                sessions = msgspec.structs.replace(plan, sessions=(one_turn,))
                await replay(sessions, client, arm=Arm("none", 0), model="m", on_sample=got.append)
            samples[name] = got[0]

    assert all(sample.ok for sample in samples.values())
    assert samples["content"].ttft_ms is not None and samples["content"].ttft_ms >= 290.0
    assert len(samples["content"].itl_ms) == 1 and samples["content"].finish_reason == "stop"
    assert samples["reasoning"].first_token_ms is not None and samples["tool"].first_token_ms is not None
    nothing = samples["nothing"]
    assert (nothing.ttft_ms, nothing.ttft_sent_ms, nothing.itl_ms, nothing.without_content) == (None, None, (), True)
    assert not samples["content"].without_content


async def test_samples_are_on_disk_while_the_replay_runs_and_walls_come_from_them(tmp_path: Path) -> None:
    path, lines_then = tmp_path / "samples.jsonl", []
    async with MockFleet([MockSpec(name="m")]) as fleet:
        with SampleLog(path) as log:

            def keep(sample: Sample) -> None:
                log.write(sample)
                lines_then.append(path.read_bytes().count(b"\n"))

            async with CompletionClient(fleet.workers[0].url, timeout_s=10.0) as client:
                await replay(small_plan(), client, arm=Arm("none", 0), model="mock-model", on_sample=keep)

    assert lines_then == [1, 2, 3, 4, 5, 6]
    samples = read_samples(path)
    path.write_bytes(path.read_bytes()[:-10])
    assert read_samples(path) == samples[:-1]
    walls = session_walls(samples)
    assert sorted(wall.session_id for wall in walls) == ["a", "b"]
    for wall in walls:
        own = [sample for sample in samples if sample.session_id == wall.session_id]
        assert (wall.turns, wall.failures) == (3, 0)
        assert wall.from_due_ms == pytest.approx(max(s.ended_ms for s in own) - min(s.due_ms for s in own), abs=0.01)
        assert wall.from_due_ms >= wall.from_sent_ms
