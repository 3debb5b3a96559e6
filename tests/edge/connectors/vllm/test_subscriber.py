"""The event socket in the loop: bounded turns, on either loop, and a stream that survives its publisher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from kvrelay.edge.connectors.base import EventSource
from kvrelay.edge.connectors.vllm.subscriber import TURN_S, EventSubscriber, OnConnected, OnMessage

Received = list[tuple[int, bytes]]


def publisher(context: zmq.Context, endpoint: str = "tcp://127.0.0.1:*") -> tuple[zmq.Socket, str]:
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket, socket.getsockopt(zmq.LAST_ENDPOINT).decode()


def subscribed(
    context: zmq.Context, source: EventSource, on_message: OnMessage, on_connected: OnConnected = lambda: None
) -> EventSubscriber:
    return EventSubscriber(context, source, on_message=on_message, on_malformed=pytest.fail, on_connected=on_connected)


async def rebound(context: zmq.Context, endpoint: str) -> zmq.Socket:
    """zmq gives a closed socket's port back a little later."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return publisher(context, endpoint)[0]
        except zmq.ZMQError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


def send(socket: zmq.Socket, seq: int, payload: bytes = b"x") -> None:
    socket.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def connected(socket: zmq.Socket, received: Received) -> None:
    """Sends until something comes through, then waits for quiet."""
    deadline = time.monotonic() + 10
    while not received:
        assert time.monotonic() < deadline
        send(socket, 0)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    received.clear()


async def test_a_turn_is_bounded_and_the_next_one_follows_by_itself() -> None:
    """Everything is in the socket before the loop looks; reading it takes many turns, and others run in between."""
    context = zmq.Context()
    received: Received = []

    def slowly(topic: bytes, seq: int, payload: bytes) -> None:
        received.append((seq, payload))
        end = time.perf_counter() + TURN_S / 10
        while time.perf_counter() < end:
            pass

    socket, endpoint = publisher(context)
    subscriber = subscribed(context, EventSource(0, endpoint), slowly)
    await connected(socket, received)
    for seq in range(400):
        send(socket, seq)
    time.sleep(0.2)  # noqa: ASYNC251 - the loop must not look while the messages arrive
    turns = 0
    while len(received) < 400:
        turns += 1
        assert turns < 100_000
        await asyncio.sleep(0)
    assert [seq for seq, _ in received] == list(range(400))
    assert turns >= 20
    subscriber.close()
    context.destroy(linger=0)


def test_on_uvloop_as_on_asyncio() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def scenario() -> Received:
        context = zmq.Context()
        received: Received = []
        socket, endpoint = publisher(context)
        subscriber = subscribed(
            context, EventSource(0, endpoint), lambda topic, seq, data: received.append((seq, data))
        )
        await connected(socket, received)
        for seq in range(50):
            send(socket, seq)
        await until(lambda: len(received) == 50)
        subscriber.close()
        context.destroy(linger=0)
        return received

    assert uvloop.run(scenario()) == [(seq, b"x") for seq in range(50)]


async def test_the_stream_goes_on_when_the_publisher_comes_back() -> None:
    context = zmq.Context()
    received: Received = []
    socket, endpoint = publisher(context)
    connections: list[None] = []
    subscriber = subscribed(
        context,
        EventSource(0, endpoint),
        lambda topic, seq, data: received.append((seq, data)),
        lambda: connections.append(None),
    )
    await connected(socket, received)
    socket.close(linger=0)
    again = await rebound(context, endpoint)
    await connected(again, received)
    send(again, 7)
    await until(lambda: (7, b"x") in received)
    assert len(connections) == 2
    subscriber.close()
    context.destroy(linger=0)


async def test_a_worker_may_connect_to_us(tmp_path: Path) -> None:
    context = zmq.Context()
    received: Received = []
    endpoint = f"ipc://{tmp_path}/kv"
    subscriber = subscribed(
        context, EventSource(0, endpoint, bind=True), lambda topic, seq, data: received.append((seq, data))
    )
    socket = context.socket(zmq.PUB)
    socket.connect(endpoint)
    await connected(socket, received)
    subscriber.close()
    subscriber.close()
    context.destroy(linger=0)
