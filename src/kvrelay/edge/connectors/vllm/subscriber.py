"""One event socket in the loop.

A burst of messages must not stop the relay of requests: each turn of the loop reads messages for a bounded time and
then lets the other callbacks run. zmq's file descriptor tells about edges only, so a turn ends either with an empty
socket or with the next turn already scheduled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq

from kvrelay.edge.connectors.base import EventSource

TURN_S = 0.002
RECEIVE_HIGH_WATER = 100_000  # messages; beyond it zmq drops and the gap in the sequence shows it
SEQ_BYTES = 8

OnMessage = Callable[[int, bytes], None]
OnMalformed = Callable[[str], None]


class EventSubscriber:
    """Subscribes from the moment it is made until `close()`. Connection loss is repaired by zmq itself."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: EventSource,
        on_message: OnMessage,
        on_malformed: OnMalformed,
    ) -> None:
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._loop = asyncio.get_running_loop()
        self._next_turn: asyncio.Handle | None = None
        self._socket = _subscribed_socket(context, source)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._turn)
        self._schedule()

    def close(self) -> None:
        if self._socket.closed:
            return
        self._loop.remove_reader(self._descriptor)
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._socket.close(linger=0)

    def _schedule(self) -> None:
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        deadline = time.perf_counter() + TURN_S
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
            if time.perf_counter() > deadline:
                self._schedule()
                return

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self._on_malformed(f"{len(frames)} frames")
        elif len(frames[1]) != SEQ_BYTES:
            self._on_malformed(f"sequence number of {len(frames[1])} bytes")
        else:
            self._on_message(int.from_bytes(frames[1], "big"), frames[2])


def _subscribed_socket(context: zmq.Context[zmq.Socket[bytes]], source: EventSource) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IPV6, "[" in source.endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
    try:
        if source.bind:
            socket.bind(source.endpoint)
        else:
            socket.connect(source.endpoint)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket
