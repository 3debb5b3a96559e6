"""Replies to a request for old messages, of both widths that engines send."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

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


@contextmanager
def engine(buffer: dict[int, bytes], *, mark: int) -> Iterator[str]:
    """Answers as vLLM's publisher does: all of the buffer in one loop, over a socket that drops beyond its mark."""
    context: zmq.Context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, mark)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if not socket.poll(20):
                continue
            identity, _, start = socket.recv_multipart()
            for number, payload in buffer.items():
                if number >= int.from_bytes(start, "big"):
                    socket.send_multipart((identity, b"", b"kv@a", seq(number), payload))
            socket.send_multipart((identity, b"", b"", END_SEQ, b""))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


@pytest.mark.covers("TP-02")
@pytest.mark.parametrize("mark", [1000, 300])
async def test_a_history_longer_than_the_engines_socket_holds_comes_whole(mark: int) -> None:
    """ZMQ drops beyond the mark without a word; real vLLM leaves it at its default, and a busy worker keeps 10,000."""
    buffer = {number: b"%d" % number * 500 for number in range(7, 10_007)}
    context: zmq.Context = zmq.Context()
    with engine(buffer, mark=mark) as endpoint:
        answer = await replay(context, endpoint, topic="kv@", from_seq=0, timeout_s=60)
    context.destroy(linger=0)
    assert answer == Replayed(tuple(buffer.items()))


async def test_what_the_worker_does_not_have_any_more_is_asked_for_once_more_and_left() -> None:
    buffer = dict.fromkeys((*range(5), *range(9, 12)), b"x")
    context: zmq.Context = zmq.Context()
    with engine(buffer, mark=1000) as endpoint:
        answer = await replay(context, endpoint, topic="kv@", from_seq=2, timeout_s=10)
        nothing = await replay(context, endpoint, topic="kv@", from_seq=12, timeout_s=10)
    context.destroy(linger=0)
    assert answer == Replayed(tuple((number, b"x") for number in (2, 3, 4, 9, 10, 11)))
    assert nothing == Replayed(())
