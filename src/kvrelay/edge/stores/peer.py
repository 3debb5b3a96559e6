"""A store in another process, reached over TCP: a worker's own memory, or whatever `kvrelay store serve` serves."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import msgspec

from kvrelay.edge.stores.frames import GREETING, Answer, Op, Request, Status, Wire, token_bytes
from kvrelay.edge.stores.memory import fill
from kvrelay.edge.stores.store import (
    DEFAULT_DEADLINE_S,
    Buffer,
    NoSpace,
    ObjectInfo,
    Store,
    StoreStats,
    StoreTimeout,
    StoreUnavailable,
    WriteOutcome,
    total_bytes,
)

MAX_IDLE_CONNECTIONS = 16
ABSENT_SIZE = (1 << 64) - 1
Result = TypeVar("Result")


class PeerStore(Store):
    """See the module text."""

    kind: ClassVar[str] = "peer"

    def __init__(self, host: str, port: int, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._address = (host, port)
        self._token = token_bytes(token)
        self._tls = tls
        self._idle: list[Wire] = []
        self._lock = threading.Lock()
        self._closed = False

    def sizes(self, keys: Sequence[bytes], *, deadline_s: float) -> list[int | None]:
        def use(wire: Wire, deadline: float) -> list[int | None]:
            answer = self._ask(wire, Op.SIZES, keys, deadline)
            content = wire.take(answer.content_bytes, deadline=deadline)
            if len(content) != 8 * len(keys):
                raise StoreUnavailable("the peer answered for other names")
            return [None if size == ABSENT_SIZE else size for (size,) in struct.iter_unpack("<Q", content)]

        return self._run(use, deadline_s) if keys else []

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        def use(wire: Wire, deadline: float) -> Buffer | None:
            answer = self._ask(wire, Op.READ, (key,), deadline)
            content = wire.take(answer.content_bytes, deadline=deadline)
            return None if answer.status is Status.ABSENT else content

        return self._run(use, deadline_s)

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        def use(wire: Wire, deadline: float) -> int | None:
            answer = self._ask(wire, Op.READ, (key,), deadline)
            if answer.status is Status.ABSENT:
                return None
            if answer.content_bytes == total_bytes(parts):
                wire.receive(parts, deadline=deadline)
            else:
                fill(parts, memoryview(wire.take(answer.content_bytes, deadline=deadline)))
            return answer.content_bytes

        return self._run(use, deadline_s)

    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        def use(wire: Wire, deadline: float) -> WriteOutcome:
            answer = self._ask(wire, Op.WRITE, (key,), deadline, content=parts, only_if_absent=only_if_absent)
            return WriteOutcome.EXISTS if answer.status is Status.EXISTS else WriteOutcome.WRITTEN

        return self._run(use, deadline_s)

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        return self._run(lambda wire, deadline: self._ask(wire, Op.DELETE, keys, deadline).number, deadline_s)

    def scan(self, prefix: bytes = b"", *, deadline_s: float) -> Iterator[ObjectInfo]:
        def use(wire: Wire, deadline: float) -> list[ObjectInfo]:
            answer = self._ask(wire, Op.SCAN, (prefix,), deadline)
            content = wire.take(answer.content_bytes, deadline=deadline)
            try:
                return msgspec.msgpack.decode(content, type=list[ObjectInfo])
            except msgspec.MsgspecError:
                raise StoreUnavailable("the peer's list is not one") from None

        return iter(self._run(use, deadline_s))

    def ping(self, *, deadline_s: float) -> None:
        self._run(lambda wire, deadline: self._ask(wire, Op.PING, (), deadline), deadline_s)

    def stats(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> StoreStats:
        def use(wire: Wire, deadline: float) -> StoreStats:
            answer = self._ask(wire, Op.STATS, (), deadline)
            return msgspec.msgpack.decode(wire.take(answer.content_bytes, deadline=deadline), type=StoreStats)

        return self._run(use, deadline_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    # --- connections -------------------------------------------------------------------------------------------------

    def _run(self, use: Callable[[Wire, float], Result], deadline_s: float) -> Result:
        """On an idle connection; if it turns out to be dead (the peer was restarted), once more on a new one."""
        deadline = time.monotonic() + deadline_s
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._use(kept, use, deadline)
            except StoreUnavailable:
                pass
        return self._use(self._connect(deadline), use, deadline)

    def _use(self, wire: Wire, use: Callable[[Wire, float], Result], deadline: float) -> Result:
        try:
            result = use(wire, deadline)
        except NoSpace:
            self._give_back(wire)
            raise
        except BaseException:
            wire.close()
            raise
        self._give_back(wire)
        return result

    def _give_back(self, wire: Wire) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < MAX_IDLE_CONNECTIONS:
                self._idle.append(wire)
                return
        wire.close()

    def _connect(self, deadline: float) -> Wire:
        try:
            connected = socket.create_connection(self._address, timeout=max(0.001, deadline - time.monotonic()))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connected = self._tls.wrap_socket(connected, server_hostname=self._address[0])
        except TimeoutError as error:
            raise StoreTimeout("the peer did not accept a connection in time") from error
        except OSError as error:
            raise StoreUnavailable(f"{self._address[0]}:{self._address[1]}: {error.strerror or error}") from error
        wire = Wire(connected)
        try:
            wire.send([GREETING + self._token], deadline=deadline)
        except BaseException:
            wire.close()
            raise
        return wire

    def _ask(
        self,
        wire: Wire,
        op: Op,
        names: Sequence[bytes],
        deadline: float,
        *,
        content: Sequence[Buffer] = (),
        only_if_absent: bool = False,
    ) -> Answer:
        left_ms = max(1, int((deadline - time.monotonic()) * 1000))
        request = Request(op, tuple(names), left_ms, total_bytes(content), only_if_absent)
        answer = wire.ask(request, content, deadline=deadline)
        if answer.status is Status.NO_SPACE:
            raise NoSpace("the peer is full")
        if answer.status is Status.TIMEOUT:
            raise StoreTimeout("the peer's store did not answer in time")
        if answer.status in (Status.UNAVAILABLE, Status.MALFORMED):
            raise StoreUnavailable("the peer's store is unavailable")
        return answer
