"""A worker that says what it got, and notes every request that a strict reader would not have taken.

`x-plan` in a request asks for other answers: see `answers.py`.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable

from bench.fuzz.strict import Message, NotHttp, read_request

# What the gateway asks about a worker; all but the first are vLLM's.
DESCRIPTION = {
    b"/v1/models": b'{"object":"list","data":[{"id":"%b","object":"model"}]}',
    b"/metrics": b'vllm:cache_config_info{block_size="16",model_name="%b"} 1.0\n',
    b"/health": b"",
}
UNKNOWN = (b"/version", b"/kv_event_sources")
FORBIDDEN_TARGET = b"/smuggled"  # only ever inside bodies


def echoed(name: str, method: str, target: str, body: bytes) -> bytes:
    """What the worker answers, which the client can work out as well."""
    said = {"id": name, "method": method, "target": target, "bytes": len(body), "crc": zlib.crc32(body)}
    padding = "." * (zlib.crc32(name.encode()) % 97 if name.endswith(("0", "5")) else 0)
    return json.dumps({**said, "padding": padding}).encode()


Planner = Callable[[Message, asyncio.StreamWriter], Awaitable[bool]]


class EchoWorker:
    """Listens on loopback and serves the model of its own name.

    `complaints` are requests that break the protocol, `smuggled` those that never were sent.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.complaints: list[str] = []
        self.smuggled: list[bytes] = []
        self.planner: Planner | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._converse(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        while True:
            more = await reader.read(2**16)
            if not more:
                return
            data += more
            try:
                message = read_request(data)
            except NotHttp as problem:
                self.complaints.append(f"{problem} in {data[:500]!r}")
                return
            if message is None:
                continue
            if len(data) > message.raw_bytes:
                self.complaints.append(f"more than one request at once: {data[:500]!r}")
                return
            data = b""
            if not await self._answer(message, writer):
                return

    async def _answer(self, message: Message, writer: asyncio.StreamWriter) -> bool:
        """False: the connection is over."""
        method, target = message.start
        self._judge(message)
        if target in UNKNOWN:
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return True
        if target in DESCRIPTION and message.value(b"x-id") is None:
            said = DESCRIPTION[target].replace(b"%b", self.name.encode())
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
            return True
        if self.planner is not None and message.value(b"x-plan") is not None:
            return await self.planner(message, writer)
        name = message.value(b"x-id") or b""
        body = echoed(name.decode("latin-1"), method.decode("latin-1"), target.decode("latin-1"), message.body)
        head = [b"HTTP/1.1 200 OK\r\nx-id: ", name, b"\r\n"]
        if method == b"HEAD":
            head.append(b"x-method: HEAD\r\ncontent-length: %d\r\n\r\n" % len(body))
        elif zlib.crc32(name) % 2:
            head.append(b"content-length: %d\r\n\r\n" % len(body) + body)
        else:
            head.append(b"transfer-encoding: chunked\r\n\r\n")
            head += [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:7], body[7:])]
            head.append(b"0\r\n\r\n")
        writer.write(b"".join(head))
        return True

    def _judge(self, message: Message) -> None:
        _, target = message.start
        if target.startswith(FORBIDDEN_TARGET):
            self.smuggled.append(target)
        hosts = message.values(b"host")
        if hosts != [f"127.0.0.1:{self.port}".encode()]:
            self.complaints.append(f"host is {hosts}")
        if message.values(b"expect"):
            self.complaints.append(f"a request as it should not be forwarded: {message.headers}")
