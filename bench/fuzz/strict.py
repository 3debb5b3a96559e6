"""A reader of HTTP/1.1 that forgives nothing, written apart from the gateway's parser: the judge of what that sends.

Every bare line feed, space, repeated length or surplus byte is an error. What cannot be judged yet is simply not there.
"""

from __future__ import annotations

import re

from msgspec import Struct

Headers = tuple[tuple[bytes, bytes], ...]

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-9]\d\d) ([\t\x20-\x7e\x80-\xff]*)\Z")
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e\x80-\xff]+) HTTP/1\.1\Z")
_HEADER = re.compile(rb"(" + _TOKEN + rb"):[ \t]*((?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)[ \t]*\Z")
_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}\Z")
_LENGTH = re.compile(rb"\d{1,15}\Z")


class NotHttp(Exception):
    """The bytes break the protocol."""


class Message(Struct, frozen=True):
    """A request or an answer. `start` is the method and target, or the status."""

    start: tuple[bytes, ...]
    headers: Headers
    body: bytes
    raw_bytes: int  # how much of the input it took

    @property
    def status(self) -> int:
        return int(self.start[0])

    def values(self, lowercase_name: bytes) -> list[bytes]:
        return [value for name, value in self.headers if name.lower() == lowercase_name]

    def value(self, lowercase_name: bytes) -> bytes | None:
        values = self.values(lowercase_name)
        return values[0] if values else None


def read_answers(data: bytes) -> tuple[list[Message], bytes]:
    """All final answers that are complete, and the rest. An answer with `x-method: HEAD` has no body."""
    answers: list[Message] = []
    while data:
        message = read_message(data, _STATUS_LINE)
        if message is None:
            break
        data = data[message.raw_bytes :]
        if message.status >= 200:
            answers.append(message)
    return answers, data


def read_request(data: bytes) -> Message | None:
    return read_message(data, _REQUEST_LINE)


def read_message(data: bytes, first_line: re.Pattern[bytes]) -> Message | None:
    """None: not complete yet. Raises NotHttp."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    _check_lines(head)
    if end < 0:
        return None
    first, *lines = head.split(b"\r\n")
    found = first_line.match(first)
    if found is None:
        raise NotHttp(f"the first line is {first[:200]!r}")
    headers = tuple(_header(line) for line in lines)
    body = _body(data[end + 4 :], found.groups(), headers)
    return None if body is None else Message(found.groups(), headers, body[0], end + 4 + body[1])


def _check_lines(head: bytes) -> None:
    if b"\n" in head.replace(b"\r\n", b""):
        raise NotHttp(f"a bare line feed in {head[:200]!r}")
    if b"\r" in head.replace(b"\r\n", b"").removesuffix(b"\r"):
        raise NotHttp(f"a bare carriage return in {head[:200]!r}")


def _header(line: bytes) -> tuple[bytes, bytes]:
    found = _HEADER.match(line)
    if found is None:
        raise NotHttp(f"a header line is {line[:200]!r}")
    return found[1], found[2]


def _body(rest: bytes, start: tuple[bytes, ...], headers: Headers) -> tuple[bytes, int] | None:
    """The body and how many bytes it took; None if it is not complete."""
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    codings = [value for name, value in headers if name.lower() == b"transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise NotHttp(f"framed more than once: {lengths} {codings}")
    if start[0] in (b"204", b"304") or start[0].startswith(b"1") or (b"x-method", b"HEAD") in headers:
        return b"", 0
    if codings:
        return _chunked(rest, codings[0])
    if not lengths:
        if len(start) == 2 and len(start[0]) == 3 and start[0].isdigit():
            raise NotHttp("an answer that ends with its connection, to a client of HTTP/1.1")
        return b"", 0
    if not _LENGTH.match(lengths[0]):
        raise NotHttp(f"content-length is {lengths[0][:100]!r}")
    length = int(lengths[0])
    return None if len(rest) < length else (rest[:length], length)


def _chunked(rest: bytes, coding: bytes) -> tuple[bytes, int] | None:
    if coding != b"chunked":
        raise NotHttp(f"transfer-encoding is {coding[:100]!r}")
    body: list[bytes] = []
    position = 0
    while True:
        end = rest.find(b"\r\n", position)
        if end < 0:
            if len(rest) - position > 20:
                raise NotHttp(f"a chunk begins with {rest[position : position + 40]!r}")
            return None
        size_text = rest[position:end]
        if not _SIZE.match(size_text):
            raise NotHttp(f"a chunk size is {size_text[:100]!r}")
        size = int(size_text, 16)
        position = end + 2
        if size == 0:
            after = _after_trailers(rest, position)
            return None if after is None else (b"".join(body), after)
        if len(rest) < position + size + 2:
            return None
        if rest[position + size : position + size + 2] != b"\r\n":
            raise NotHttp("a chunk is longer than it says")
        body.append(rest[position : position + size])
        position += size + 2


def _after_trailers(rest: bytes, position: int) -> int | None:
    """Where the message ends: behind the empty line that follows the last trailer. None: not there yet."""
    while True:
        end = rest.find(b"\r\n", position)
        line = rest[position:] if end < 0 else rest[position:end]
        if b"\n" in line or b"\r" in line.removesuffix(b"\r"):
            raise NotHttp(f"a bare line end in trailers: {line[:200]!r}")
        if end < 0:
            return None
        position = end + 2
        if not line:
            return position
        name, _ = _header(line)
        if name.lower() in (b"content-length", b"transfer-encoding", b"host", b"trailer"):
            raise NotHttp(f"a trailer that must be none: {line[:200]!r}")
