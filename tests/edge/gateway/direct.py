"""One request sent twice, byte for byte: straight to a worker and through a gateway. What came back, to be compared."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec import Struct

from kvrelay.edge.http.heads import HOP_BY_HOP

# Values that differ between any two requests; their length does not.
_PASSING = re.compile(rb'"(?:created|created_at|monotonic_s)":[0-9.]+')


class Answer(Struct, frozen=True):
    """What a client sees. `headers` in their order and spelling, those between neighbours left out."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def framed_by_length(self) -> bool:
        return any(name.lower() == b"content-length" for name, _ in self.headers)


class AnswerReader:
    """Collects one answer."""

    def __init__(self, *, head: bool) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.headers_complete = False
        self.done = False
        self._head = head
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.headers_complete = self.status != 100
        if self.status == 100:
            self.headers = []
        elif self._head:
            self.done = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        if self.status != 100:
            self.done = True


def post(path: str, body: object, *headers: tuple[str, str], method: str = "POST") -> bytes:
    """A request with everything after the host; a body that is not bytes is sent as JSON."""
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    named = {name.lower() for name, _ in headers}
    lines = [f"{name}: {value}" for name, value in headers]
    if "content-type" not in named:
        lines.append("content-type: application/json")
    if "content-length" not in named and "transfer-encoding" not in named:
        lines.append(f"content-length: {len(raw)}")
    return b"%b %b HTTP/1.1\r\nHost: HOST\r\nx-request-id: same\r\n%b\r\n\r\n%b" % (
        method.encode(),
        path.encode(),
        "\r\n".join(lines).encode("latin-1"),
        raw,
    )


def get(path: str, *headers: tuple[str, str], method: str = "GET") -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"{method} {path} HTTP/1.1\r\nHost: HOST\r\nx-request-id: same\r\n{lines}\r\n".encode("latin-1")


async def ask(url: str, request: bytes) -> Answer:
    """Send these bytes to `url` (HOST becomes its authority) and read one whole answer."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request.replace(b"HOST", address.netloc.encode(), 1))
        read = AnswerReader(head=request.startswith(b"HEAD "))
        async with asyncio.timeout(10):
            while not read.done:
                data = await reader.read(65536)
                if not data:
                    break
                read.parser.feed_data(data)
        kept = tuple(header for header in read.headers if header[0].lower() not in HOP_BY_HOP)
        return Answer(read.status, kept, read.body)
    finally:
        writer.close()


def masked(body: bytes) -> bytes:
    """The body with what differs between any two requests made equal."""
    return _PASSING.sub(lambda found: b"0" * len(found[0]), body)


async def both(worker: str, gateway: str, request: bytes) -> tuple[Answer, Answer]:
    """The same request to the worker and through the gateway, one after the other."""
    return await ask(worker, request), await ask(gateway, request)


def assert_equal(direct: Answer, relayed: Answer) -> None:
    """Equal but for the headers that the gateway says it adds."""
    ours = (b"x-kvrelay-request-id", b"x-kvrelay-worker", b"x-kvrelay-route-reason", b"x-kvrelay-matched-tokens")
    passed = tuple(header for header in relayed.headers if header[0] not in ours)
    assert relayed.status == direct.status, (direct, relayed)
    assert sorted(passed) == sorted(direct.headers), (direct.headers, relayed.headers)
    assert masked(relayed.body) == masked(direct.body)
    added = [name for name, _ in relayed.headers if name in ours]
    assert set(ours[:3]) <= set(added) and len(added) == len(set(added)), added
