"""Listens to one event source for a while, without any filter: what is published under another topic shows as well."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import NamedTuple, Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvrelay.edge.connectors.base import EventSource

SEQ_BYTES = 8
MAX_HEARD = 10_000


class Heard(NamedTuple):
    """One message. `at_s` is our wall clock when it came."""

    topic: str
    payload: bytes
    at_s: float


class Listener:
    """`async with Listener(...)`; `heard` grows until it is left."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: EventSource) -> None:
        self.heard: list[Heard] = []
        self.malformed: str | None = None
        self.why_not_tried: str | None = None
        self._source = source
        self._context = context
        self._connected = asyncio.Event()
        self._spoke = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        sockets = zmq.asyncio.Context.shadow(self._context.underlying)
        self._socket = sockets.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, "[" in self._source.endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            if self._source.bind:
                self._socket.bind(self._source.endpoint)
            else:
                self._socket.connect(self._source.endpoint)
        except zmq.ZMQError as error:
            taken = error.errno == zmq.EADDRINUSE
            reason = "the port is taken, most likely by the running gateway" if taken else str(error)
            self.why_not_tried = f"{self._source.endpoint}: {reason}"
            return self
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch_connection())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def connected(self, within_s: float) -> bool | None:
        """Whether a publisher is at the other end; None when that could not be tried."""
        if self.why_not_tried is not None:
            return None
        try:
            async with asyncio.timeout(within_s):
                await self._connected.wait()
        except TimeoutError:
            return False
        return True

    async def spoke(self) -> None:
        """Returns once a message has come."""
        await self._spoke.wait()

    async def _read(self) -> None:
        while len(self.heard) < MAX_HEARD:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != SEQ_BYTES:
                self.malformed = f"a message of {len(frames)} frames instead of topic, sequence number and payload"
                continue
            self._spoke.set()
            self.heard.append(Heard(frames[0].decode("utf-8", "replace"), frames[2], time.time()))

    async def _watch_connection(self) -> None:
        while True:
            message = await self._monitor.recv_multipart()
            if parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected.set()
