"""Status 200, and yet the engine gave up: tried elsewhere while the client has nothing, and never counted as served."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import msgspec
import pytest

from kvrelay.core.model.units import Fault, Status
from kvrelay.edge.gateway.gave_up import gave_up, gave_up_at_once
from kvrelay.edge.http.server import Exchange
from tests.edge.gateway.scripted import (
    ANSWER,
    JSON,
    ScriptedWorker,
    breaks,
    chunk,
    client_of,
    receipts,
    running,
    streams,
    token_body,
)

ABORTED = (
    b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"","logprobs":null,'
    b'"finish_reason":"abort"}],"usage":{"prompt_tokens":40,"total_tokens":40,"completion_tokens":0}}'
)
ABORTED_EVENT = b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\ndata: [DONE]\n\n'
ERROR_EVENT = (
    b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}\n\n'
    b"data: [DONE]\n\n"
)
MISTAKE_EVENT = b'data: {"error":{"message":"token id out of vocabulary","type":"BadRequestError","code":400}}\n\n'


def aborts(exchange: Exchange) -> None:
    exchange.respond(200, (JSON,), ABORTED)


@pytest.mark.covers("RC-14")
@pytest.mark.parametrize(
    ("script", "body"),
    [
        (aborts, {}),
        (streams(ABORTED_EVENT), {"stream": True}),
        (streams(ERROR_EVENT), {"stream": True}),
    ],
    ids=["whole", "aborted-stream", "failed-stream"],
)
async def test_what_was_given_up_at_once_is_done_by_another_worker(script, body) -> None:
    a, b = ScriptedWorker("a", script), ScriptedWorker("b")
    async with running(a, b, gateway__policy="round_robin") as gateway, client_of(gateway) as client:
        for _ in range(2):  # at least one of the two goes to `a` first
            status, answered, headers = await client.post(token_body(**body))
            assert (status, answered, headers["x-kvrelay-worker"]) == (200, ANSWER, "b")
        moved = next(receipt for receipt in receipts(gateway) if len(receipt.attempts) == 2)
        assert [attempt.worker for attempt in moved.attempts] == ["a", "b"]
        assert moved.attempts[0].fault is Fault.SERVER_ERROR
        assert (moved.status, moved.fallback_reason) == (Status.OK, "retried_elsewhere")


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
EMPTY = b'data: {"choices":[{"index":0,"text":"","finish_reason":null}],"usage":null}\n\n'


@pytest.mark.covers("S25")
@pytest.mark.parametrize("said", [(ROLE,), (EMPTY, EMPTY)], ids=["a role", "half a character"])
async def test_a_stream_that_has_said_nothing_yet_can_still_come_from_another_worker(said) -> None:
    a, b = ScriptedWorker("a", breaks(*said)), ScriptedWorker("b", streams(ROLE, chunk("one")))
    async with running(a, b, gateway__policy="round_robin") as gateway, client_of(gateway) as client:
        for _ in range(2):
            status, answered, headers = await client.post(token_body(stream=True))
            assert (status, answered, headers["x-kvrelay-worker"]) == (200, ROLE + chunk("one"), "b")
        moved = next(receipt for receipt in receipts(gateway) if len(receipt.attempts) == 2)
        assert (moved.attempts[0].fault, moved.status) == (Fault.RESET, Status.OK)


async def test_where_nobody_else_is_such_a_stream_is_refused_instead_of_broken() -> None:
    async with running(ScriptedWorker("a", breaks(ROLE))) as gateway, client_of(gateway) as client:
        status, _, headers = await client.post(token_body(stream=True))
        assert (status, headers["x-kvrelay-reason"]) == (502, "worker_lost")


@pytest.mark.parametrize("end", [ERROR_EVENT, b"data: [DONE]\n\n", EMPTY], ids=["gave up", "done", "nothing more"])
async def test_what_was_kept_reaches_the_client_in_its_place(end: bytes) -> None:
    async with running(ScriptedWorker("a", streams(ROLE, end))) as gateway, client_of(gateway) as client:
        status, answered, _ = await client.post(token_body(stream=True))
        assert (status, answered) == (200, ROLE + end)


async def test_without_another_worker_the_client_gets_the_workers_own_words() -> None:
    async with running(ScriptedWorker("a", aborts)) as gateway, client_of(gateway) as client:
        status, answered, _ = await client.post(token_body())
        assert (status, answered) == (200, ABORTED)
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (Status.ERROR, "server_error")


@pytest.mark.covers("RC-11")
@pytest.mark.parametrize("end", [ABORTED_EVENT, ERROR_EVENT])
async def test_what_was_given_up_in_the_middle_passes_and_is_no_success(end: bytes) -> None:
    first = chunk("one")
    async with (
        running(ScriptedWorker("a", streams(first, end))) as gateway,
        client_of(gateway) as client,
    ):
        status, answered, _ = await client.post(token_body(stream=True))
        assert (status, answered) == (200, first + end)
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (Status.ERROR, "server_error")
        assert receipt.attempts[0].fault is Fault.SERVER_ERROR


async def test_a_mistake_of_the_client_in_an_event_is_nobody_elses_to_better() -> None:
    a, b = ScriptedWorker("a", streams(MISTAKE_EVENT)), ScriptedWorker("b", streams(MISTAKE_EVENT))
    async with running(a, b) as gateway, client_of(gateway) as client:
        status, answered, _ = await client.post(token_body(stream=True))
        assert (status, answered) == (200, MISTAKE_EVENT)
        assert len(receipts(gateway)[0].attempts) == 1


@pytest.mark.parametrize(
    "said",
    [
        ABORTED.replace(b'"text":""', b'"text":"so far"'),
        b'data: {"choices":[{"index":0,"delta":{"content":"say \\"finish_reason\\": \\"abort\\""}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"\\ndata: {\\"error\\": {}}"}}]}\n\n',
        b'{"choices":[{"text":"","finish_reason":"stop"}],"error":null}',
        b'data: {"error": 7}\n\n',
        b"",
    ],
)
def test_what_only_speaks_of_it_is_an_answer_like_any_other(said: bytes) -> None:
    assert not gave_up_at_once(said)


def test_an_error_without_a_code_is_the_engines() -> None:
    for code in (None, 500, "internal"):
        assert gave_up(b"data: " + msgspec.json.encode({"error": {"message": "m", "code": code}}) + b"\n\n")


def test_the_end_of_a_long_stream_is_not_gone_through_line_by_line() -> None:
    """Every stream ends with this question; it is to cost about as much as two plain searches, not as an expression."""
    event = b'data: {"id":"cmpl-1","choices":[{"index":0,"delta":{"content":" no \\"error\\" here"}}]}\n\n'
    end = event * (64 * 1024 // len(event))

    def took_s(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=5, repeat=5))

    searches_s = took_s(lambda: (end.rfind(b'"abort"'), end.rfind(b'"error"')))
    assert took_s(lambda: gave_up(end)) < 5 * searches_s
