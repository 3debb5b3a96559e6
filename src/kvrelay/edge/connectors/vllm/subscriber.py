"""One event socket in the loop.

A burst of messages must not stop the relay of requests: each turn of the loop reads messages for a bounded time and
then lets the other callbacks run. zmq's file descriptors tell about edges only, so a turn ends either with an empty
socket or with the next turn already scheduled.

zmq reconnects by itself and says nothing about it to the reader, but what was published meanwhile is lost, and if
nothing follows, no gap will ever show it. So the socket is monitored, and `on_connected` tells of every connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvrelay.edge.connectors.base import EventSource

TURN_S = 0.002
RECEIVE_HIGH_WATER = 100_000  # messages; beyond it zmq drops and the gap in the sequence shows it
RECONNECT_MS = 100
SEQ_BYTES = 8

OnMessage = Callable[[bytes, int, bytes], None]
"""Topic, sequence number, payload."""
OnMalformed = Callable[[bytes, str], None]
"""Topic, as far as the message has one, and what is wrong with it."""
OnConnected = Callable[[], None]
Context = zmq.Context[zmq.Socket[bytes]]


class EventSubscriber:
    """Subscribes from the moment it is made until `close()`. Raises ZMQError for a bad endpoint."""

    problem: str | None = None  # nobody else has a part of this socket

    def __init__(
        self,
        context: Context,
        source: EventSource,
        *,
        on_message: OnMessage,
        on_malformed: OnMalformed,
        on_connected: OnConnected,
    ) -> None:
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._on_connected = on_connected
        self._loop = asyncio.get_running_loop()
        self._next_turn: asyncio.Handle | None = None
        self._socket = _subscribing_socket(context, source)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._descriptors = [int(socket.getsockopt(zmq.FD)) for socket in (self._socket, self._monitor)]
        try:
            _attach(self._socket, source)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._turn)
        self._schedule()

    def close(self) -> None:
        """May be called again."""
        if self._socket.closed:
            return
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _schedule(self) -> None:
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        self._read_monitor()
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

    def _read_monitor(self) -> None:
        while not self._monitor.closed:
            try:
                message = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_connected()

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self._on_malformed(frames[0], f"{len(frames)} frames")
        elif len(frames[1]) != SEQ_BYTES:
            self._on_malformed(frames[0], f"sequence number of {len(frames[1])} bytes")
        else:
            self._on_message(frames[0], int.from_bytes(frames[1], "big"), frames[2])


def _subscribing_socket(context: Context, source: EventSource) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.IPV6, "[" in source.endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
    return socket


def _attach(socket: zmq.Socket[bytes], source: EventSource) -> None:
    if source.bind:
        socket.bind(source.endpoint)
    else:
        socket.connect(source.endpoint)
