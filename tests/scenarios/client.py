"""A client that can leave at any moment, and writes down what it saw of every request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from tests.edge.gateway.direct import AnswerReader

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE_S = 30.0


class Seen(msgspec.Struct):
    """One request and what came back. Without `status` no head came."""

    request_id: str
    status: int | None = None
    headers: dict[str, str] = {}
    body: bytes = b""
    complete: bool = False
    left: bool = False

    @property
    def worker(self) -> str | None:
        return self.headers.get("x-kvrelay-worker")

    @property
    def reason(self) -> str | None:
        return self.headers.get("x-kvrelay-route-reason")


class Client:
    """Every request has a connection and an id of its own."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._numbers = count(1)
        self.seen: list[Seen] = []

    async def complete(self, prompt: object, *, max_tokens: int = 4, session: str | None = None, **more: Any) -> Seen:
        """A completion; `leave_when` and `leave_after_s` as for `send`, whatever else is a member of the body."""
        leaving = {name: more.pop(name) for name in ("leave_when", "leave_after_s", "headers") if name in more}
        return await self.send(COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens, **more}, session, **leaving)

    async def send(
        self,
        path: str,
        body: object,
        session: str | None = None,
        *,
        method: str = "POST",
        headers: tuple[tuple[str, str], ...] = (),
        leave_when: Callable[[AnswerReader], bool] | None = None,
        leave_after_s: float | None = None,
    ) -> Seen:
        """Read the answer to its end, or leave: as soon as `leave_when` holds, or after a time."""
        seen = Seen(f"scenario-{next(self._numbers)}")
        self.seen.append(seen)
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        answer = AnswerReader(head=method == "HEAD")
        try:
            writer.write(self._request(seen.request_id, path, body, session, method, headers))
            await writer.drain()
            async with asyncio.timeout(leave_after_s or PATIENCE_S):
                await _read(reader, answer, seen, leave_when)
        except TimeoutError:
            assert leave_after_s is not None, f"{seen.request_id} had no answer after {PATIENCE_S} s"
            seen.left = True
        finally:
            writer.close()
        if answer.headers_complete:
            seen.status = answer.status
            seen.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in answer.headers}
        seen.body, seen.complete = answer.body, answer.done
        return seen

    def _request(
        self,
        request_id: str,
        path: str,
        body: object,
        session: str | None,
        method: str,
        headers: tuple[tuple[str, str], ...],
    ) -> bytes:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        named = {
            "host": self._address.netloc,
            "x-request-id": request_id,
            "content-type": "application/json",
            "content-length": str(len(raw)),
            **({} if session is None else {"x-session-id": session}),
            **dict(headers),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + raw


async def _read(
    reader: asyncio.StreamReader, answer: AnswerReader, seen: Seen, leave_when: Callable[[AnswerReader], bool] | None
) -> None:
    try:
        while not answer.done:
            data = await reader.read(65536)
            if not data:
                return
            answer.parser.feed_data(data)
            if not answer.done and leave_when is not None and leave_when(answer):
                seen.left = True
                return
    except (ConnectionResetError, httptools.HttpParserError):
        return  # broken: neither complete nor left
