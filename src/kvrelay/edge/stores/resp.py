"""As much of RESP2 (the protocol of Redis and Valkey) as a store needs, made for large values.

A value is sent from the buffers it lies in (sendmsg) and received into the buffers it is meant for (recvmsg_into): no
copy in this process, one or two system calls per value. General clients build a bytes object per reply, which costs
them half of what loopback can do.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence

from kvrelay.edge.stores.store import Buffer, NoSpace, StoreTimeout, StoreUnavailable, total_bytes

_FIRST_READ = 64  # enough for every line that announces a value; what it takes of the value is copied
_MAX_LINE = 65_536
_TIMEVAL = struct.Struct("ll")


class Refusal(Exception):
    """The server's error line."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = line.split(" ", 1)[0]


Reply = bytes | int | None | list["Reply"] | Refusal


class Connection:
    """One socket, one caller at a time. After any exception but Refusal it must not be used again."""

    def __init__(self, host: str, port: int, *, deadline: float, tls: ssl.SSLContext | None = None) -> None:
        try:
            plain = socket.create_connection((host, port), timeout=_left(deadline))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
        except TimeoutError as error:
            raise StoreTimeout(f"{host}:{port} did not accept a connection in time") from error
        except OSError as error:
            raise StoreUnavailable(f"{host}:{port}: {error.strerror or error}") from error
        self._tls = tls is not None
        if not self._tls:
            self._socket.settimeout(None)  # deadlines are the kernel's: one call for a whole value
        self._held = b""  # received and not yet consumed

    def close(self) -> None:
        self._socket.close()

    def call(self, *words: bytes, deadline: float) -> Reply:
        """One command of short words, its reply. `deadline` is of the monotonic clock. Raises Refusal."""
        self.send([encode(words)], deadline=deadline)
        reply = self.reply(deadline=deadline)
        if isinstance(reply, Refusal):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Sequence[bytes]], *, deadline: float) -> list[Reply]:
        """Several commands in one go; refusals are among the replies."""
        self.send([b"".join(encode(words) for words in commands)], deadline=deadline)
        return [self.reply(deadline=deadline) for _ in commands]

    def get_into(self, key: bytes, parts: Sequence[memoryview], *, deadline: float) -> int | None:
        """GET into buffers: the value's length, None when there is none. A value that is longer than the buffers is
        read and thrown away."""
        self.send([encode((b"GET", key))], deadline=deadline)
        kind, size = self._announced(deadline)
        if kind != b"$":
            raise _unexpected(kind)
        if size < 0:
            return None
        if size > total_bytes(parts):
            self._value(size, deadline)
            return size
        self._receive(_cut(parts, size), deadline)
        self._end_of_value(deadline)
        return size

    def send(self, parts: Sequence[Buffer], *, deadline: float) -> None:
        waiting = [memoryview(part).cast("B") for part in parts]
        while waiting:
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.send(waiting[0]) if self._tls else self._socket.sendmsg(waiting)
            except OSError as error:
                raise _translated(error) from error
            waiting = advance(waiting, sent)

    def reply(self, *, deadline: float) -> Reply:
        kind, rest = self._line(deadline)
        if kind == b"+":
            return rest
        if kind == b"-":
            return Refusal(rest.decode(errors="replace"))
        size = _number(rest)
        if kind == b":":
            return size
        if kind == b"$":
            return None if size < 0 else self._value(size, deadline)
        if kind == b"*":
            return None if size < 0 else [self.reply(deadline=deadline) for _ in range(size)]
        raise _unexpected(kind)

    def _announced(self, deadline: float) -> tuple[bytes, int]:
        kind, rest = self._line(deadline)
        if kind == b"-":
            raise Refusal(rest.decode(errors="replace"))
        return kind, _number(rest)

    def _line(self, deadline: float) -> tuple[bytes, bytes]:
        while (end := self._held.find(b"\r\n")) < 0:
            if len(self._held) > _MAX_LINE:
                raise StoreUnavailable("the server sent a line without end")
            self._held += self._some(_FIRST_READ, deadline)
        line, self._held = self._held[:end], self._held[end + 2 :]
        return line[:1], line[1:]

    def _some(self, limit: int, deadline: float) -> bytes:
        self._arm(socket.SO_RCVTIMEO, deadline)
        try:
            got = self._socket.recv(limit)
        except OSError as error:
            raise _translated(error) from error
        if not got:
            raise StoreUnavailable("the server closed the connection")
        return got

    def _value(self, size: int, deadline: float) -> bytes:
        value = bytearray(size)
        self._receive([memoryview(value)], deadline)
        self._end_of_value(deadline)
        return bytes(value)

    def _end_of_value(self, deadline: float) -> None:
        while len(self._held) < 2:
            self._held += self._some(2 - len(self._held), deadline)
        if self._held[:2] != b"\r\n":
            raise StoreUnavailable("the server's value is not as long as it said")
        self._held = self._held[2:]

    def _receive(self, parts: list[memoryview], deadline: float) -> None:
        """Fill the parts, first with what is held."""
        held = self._held
        while held and parts:
            size = min(len(held), parts[0].nbytes)
            parts[0][:size] = held[:size]
            held, parts = held[size:], advance(parts, size)
        self._held = held
        while parts:
            self._arm(socket.SO_RCVTIMEO, deadline)
            try:
                if self._tls:
                    got = self._socket.recv_into(parts[0])
                else:
                    got = self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                raise _translated(error) from error
            if got == 0:
                raise StoreUnavailable("the server closed the connection in the middle of a value")
            parts = advance(parts, got)

    def _arm(self, option: int, deadline: float) -> None:
        left = _left(deadline)
        if self._tls:
            self._socket.settimeout(left)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), int(left % 1 * 1e6) or 1))


def encode(words: Sequence[bytes]) -> bytes:
    """A command as RESP wants it."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts += (b"$%d\r\n" % len(word), word, b"\r\n")
    return b"".join(parts)


def encode_around(words: Sequence[bytes], value_bytes: int, after: Sequence[bytes]) -> tuple[bytes, bytes]:
    """What precedes and what follows a value of that length in a command."""
    before = [b"*%d\r\n" % (len(words) + 1 + len(after))]
    for word in words:
        before += (b"$%d\r\n" % len(word), word, b"\r\n")
    before.append(b"$%d\r\n" % value_bytes)
    behind = [b"\r\n"]
    for word in after:
        behind += (b"$%d\r\n" % len(word), word, b"\r\n")
    return b"".join(before), b"".join(behind)


def advance(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts after `done` bytes."""
    for i, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[i + 1 :]]
        done -= part.nbytes
    return []


def refused(refusal: Refusal) -> Exception:
    """A server's refusal in a store's words."""
    if refusal.code in ("OOM", "-OOM"):
        return NoSpace("the server is full (OOM)")
    return StoreUnavailable(f"the server refused: {refusal.code}")


def _cut(parts: Sequence[memoryview], size: int) -> list[memoryview]:
    """The first `size` bytes of the parts."""
    cut = []
    for part in parts:
        if size <= 0:
            break
        cut.append(part[:size])
        size -= part.nbytes
    return [part for part in cut if part.nbytes]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise StoreTimeout("the deadline has passed")
    return left


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise StoreUnavailable("the server does not speak RESP") from None


def _unexpected(kind: bytes) -> StoreUnavailable:
    return StoreUnavailable(f"the server answered with type {kind!r}")


def _translated(error: OSError) -> Exception:
    if isinstance(error, TimeoutError | BlockingIOError):
        return StoreTimeout("the server did not answer in time")
    return StoreUnavailable(f"the connection broke: {error.strerror or error}")
