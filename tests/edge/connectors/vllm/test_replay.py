"""Replies to a request for old messages, of both widths that engines send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from kvrelay.edge.connectors.vllm.replay import END_SEQ, NoReplay, Replayed, replay


@asynccontextmanager
async def answering(replies: list[list[bytes]]) -> AsyncIterator[tuple[zmq.Context, str]]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    async def answer() -> None:
        identity, _, _ = await socket.recv_multipart()
        for reply in replies:
            await socket.send_multipart([identity, *reply])

    task = asyncio.create_task(answer())
    plain: zmq.Context = zmq.Context()
    try:
        yield plain, f"tcp://127.0.0.1:{port}"
    finally:
        await task
        plain.destroy(linger=0)
        context.destroy(linger=0)


def seq(number: int) -> bytes:
    return number.to_bytes(8, "big")


@pytest.mark.parametrize(
    "replies",
    [
        pytest.param(
            [[b"", b"kv@a", seq(4), b"x"], [b"", b"kv@a", seq(5), b"y"], [b"", b"", END_SEQ, b""]], id="with-topic"
        ),
        pytest.param([[b"", seq(4), b"x"], [b"", seq(5), b"y"], [b"", END_SEQ, b""]], id="sglang-before-0.5.22"),
    ],
)
@pytest.mark.covers("TP-02")
async def test_both_widths_of_replies_are_read(replies: list[list[bytes]]) -> None:
    async with answering(replies) as (context, endpoint):
        answer = await replay(context, endpoint, topic="kv@", from_seq=4, timeout_s=10)
    assert answer == Replayed(((4, b"x"), (5, b"y")))


@pytest.mark.parametrize("frames", [[b"", b"x"], [b"", b"kv", b"short", b"x"], [b"", b"a", b"b", seq(1), b"x"]])
async def test_replies_of_other_shapes_are_no_answer(frames: list[bytes]) -> None:
    async with answering([frames]) as (context, endpoint):
        answer = await replay(context, endpoint, topic="", from_seq=0, timeout_s=10)
    assert answer == NoReplay(f"malformed answer of {len(frames)} frames")
