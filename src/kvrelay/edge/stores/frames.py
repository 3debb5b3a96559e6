"""What peers say to each other: one request, one answer, in turn, over one TCP connection.

    request   u8 operation, u8 flags, u16 names, u32 milliseconds left, u64 content bytes, then per name u16 length and
    name answer    u8 status, u64 number, u64 content bytes

then the content. A connection begins with a greeting: 8 bytes with the protocol's version, then a token of 32 bytes
(zeros without one). Bulk bytes are sent from where they lie and received where they belong.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum

from msgspec import Struct

from kvrelay.edge.stores.resp import advance
from kvrelay.edge.stores.store import Buffer, StoreTimeout, StoreUnavailable, total_bytes

GREETING = b"kvrelay1"
TOKEN_BYTES = 32
MAX_NAMES = 65_535
MAX_NAME_BYTES = 64
MAX_CONTENT_BYTES = 1 << 30
_REQUEST = struct.Struct("<BBHIQ")
_ANSWER = struct.Struct("<BQQ")


class Op(IntEnum):
    SIZES = 1
    READ = 2
    WRITE = 3
    DELETE = 4
    SCAN = 5
    PING = 6
    STATS = 7


class Status(IntEnum):
    OK = 0
    ABSENT = 1
    EXISTS = 2
    NO_SPACE = 3
    TIMEOUT = 4
    UNAVAILABLE = 5
    MALFORMED = 6


class Request(Struct, frozen=True):
    op: Op
    names: tuple[bytes, ...]
    left_ms: int
    content_bytes: int
    only_if_absent: bool


class Answer(Struct, frozen=True):
    status: Status
    number: int
    content_bytes: int


def token_bytes(token: str | None) -> bytes:
    """What the greeting carries for a shared secret."""
    return bytes(TOKEN_BYTES) if not token else hashlib.blake2b(token.encode(), digest_size=TOKEN_BYTES).digest()


class Wire:
    """A connected socket that moves exact numbers of bytes until a deadline of the monotonic clock."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def close(self) -> None:
        self._socket.close()

    def send(self, parts: Sequence[Buffer], *, deadline: float) -> None:
        waiting = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        while waiting:
            self._arm(deadline)
            try:
                plain = not hasattr(self._socket, "cipher")
                sent = self._socket.sendmsg(waiting[:64]) if plain else self._socket.send(waiting[0])
            except OSError as error:
                raise _translated(error) from error
            waiting = advance(waiting, sent)

    def receive(self, parts: Sequence[memoryview], *, deadline: float) -> None:
        for part in parts:
            got = 0
            while got < part.nbytes:
                self._arm(deadline)
                try:
                    more = self._socket.recv_into(part[got:])
                except OSError as error:
                    raise _translated(error) from error
                if not more:
                    raise StoreUnavailable("the peer closed the connection")
                got += more

    def take(self, size: int, *, deadline: float) -> bytearray:
        memory = bytearray(size)
        self.receive([memoryview(memory)], deadline=deadline)
        return memory

    def discard(self, size: int, *, deadline: float) -> None:
        """Read and forget."""
        memory = memoryview(bytearray(min(size, 1 << 16)))
        while size > 0:
            part = memory[: min(size, memory.nbytes)]
            self.receive([part], deadline=deadline)
            size -= part.nbytes

    def ask(self, request: Request, content: Sequence[Buffer], *, deadline: float) -> Answer:
        names = b"".join(struct.pack("<H", len(name)) + name for name in request.names)
        head = _REQUEST.pack(
            request.op, request.only_if_absent, len(request.names), request.left_ms, total_bytes(content)
        )
        self.send([head + names, *content], deadline=deadline)
        status, number, size = _ANSWER.unpack(self.take(_ANSWER.size, deadline=deadline))
        try:
            return Answer(Status(status), number, size)
        except ValueError:
            raise StoreUnavailable("the peer does not speak this protocol") from None

    def hear(self, *, deadline: float) -> Request | None:
        """The next request's head and names; None when they are malformed."""
        op, flags, count, left_ms, content_bytes = _REQUEST.unpack(self.take(_REQUEST.size, deadline=deadline))
        soon = min(deadline, time.monotonic() + 10.0)
        names = []
        for _ in range(count):
            (length,) = struct.unpack("<H", self.take(2, deadline=soon))
            if length > MAX_NAME_BYTES:
                return None
            names.append(bytes(self.take(length, deadline=soon)))
        if op not in Op.__members__.values() or content_bytes > MAX_CONTENT_BYTES:
            return None
        return Request(Op(op), tuple(names), left_ms, content_bytes, bool(flags & 1))

    def reply(self, status: Status, number: int, content: Sequence[Buffer], *, deadline: float) -> None:
        self.send([_ANSWER.pack(status, number, total_bytes(content)), *content], deadline=deadline)

    def _arm(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeout("the deadline has passed")
        self._socket.settimeout(left)


def _translated(error: OSError) -> Exception:
    if isinstance(error, TimeoutError):
        return StoreTimeout("the peer did not answer in time")
    return StoreUnavailable(f"the connection broke: {error.strerror or error}")
