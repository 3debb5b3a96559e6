"""Questions to a worker over HTTP. The one place where the client library's exceptions become ours."""

from __future__ import annotations

import asyncio
import errno
import ssl
from array import array
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.http.tls import tls_complaint
from kvrelay.edge.system.unreadable import UNREADABLE

MAX_ANSWER_BYTES = 64 * 2**20

T = TypeVar("T")


class _Tokenized(Struct):
    tokens: list[int]


class _Sharing(Struct):
    on: bool | None


class Answer(Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes


async def get(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Answer:
    """The answer, whatever its status. Raises WorkerUnreachable."""
    return await _ask(session, "GET", url, headers, None)


async def get_json(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], kind: type[T]) -> T:
    """The answer's body as `kind`. Raises WorkerUnreachable or WorkerAnswerUnusable."""
    return as_json(await get(session, url, headers), url, kind)


async def post_json(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], payload: Mapping[str, Any], kind: type[T]
) -> T:
    """The answer's body as `kind`. Raises WorkerUnreachable or WorkerAnswerUnusable."""
    return as_json(await _ask(session, "POST", url, headers, msgspec.json.encode(payload)), url, kind)


async def post(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Answer:
    """The answer to an order without a body, whatever its status. Raises WorkerUnreachable or WorkerAnswerUnusable."""
    return await _ask(session, "POST", url, headers, None)


async def sharing(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], on: bool | None) -> bool | None:
    """What a switch for shared tiers says, after it was thrown unless `on` is None. Raises as `post_json`."""
    order = None if on is None else msgspec.json.encode({"on": on})
    answer = await _ask(session, "GET" if on is None else "PUT", url, headers, order)
    return as_json(answer, url, _Sharing).on


async def token_ids(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], payload: Mapping[str, Any]
) -> TokenIds:
    """What a `/tokenize` endpoint answers. Raises WorkerUnreachable or WorkerAnswerUnusable."""
    answer = await post_json(session, url, headers, payload, _Tokenized)
    try:
        return np.frombuffer(array("I", answer.tokens), dtype=np.uint32)
    except OverflowError as error:
        raise WorkerAnswerUnusable(f"{url} answered a token id out of range: {error}") from error


def as_json(answer: Answer, url: str, kind: type[T]) -> T:
    if answer.status != 200:
        raise WorkerAnswerUnusable(f"{url} answered {answer.status}")
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except UNREADABLE as error:
        raise WorkerAnswerUnusable(f"{url} answered something else: {error}") from error


async def _ask(
    session: aiohttp.ClientSession, method: str, url: str, headers: Mapping[str, str], body: bytes | None
) -> Answer:
    if body is not None:
        headers = {**headers, "content-type": "application/json"}
    try:
        async with session.request(method, url, headers=headers, data=body, allow_redirects=False) as response:
            content = await _read_bounded(response, url)
            return Answer(response.status, response.headers, content)
    except aiohttp.ClientSSLError as error:
        raise WorkerUnreachable(_tls_complaint(error), refused=False) from error
    except aiohttp.ClientConnectorError as error:
        refused = _is_refused(error.os_error)
        raise WorkerUnreachable("connection refused" if refused else str(error), refused=refused) from error
    except TimeoutError as error:
        raise WorkerUnreachable("no answer in time", refused=False) from error
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise WorkerUnreachable(f"{type(error).__name__}: {error}", refused=False) from error


def _tls_complaint(error: aiohttp.ClientSSLError) -> str:
    cause = error.certificate_error if isinstance(error, aiohttp.ClientConnectorCertificateError) else error.os_error
    return tls_complaint(cause) if isinstance(cause, ssl.SSLError) else str(error)


def _is_refused(error: OSError) -> bool:
    """A name with several addresses gives one error that only quotes those of the single attempts."""
    return error.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in str(error)


async def _read_bounded(response: aiohttp.ClientResponse, url: str) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    async for part in response.content.iter_chunked(2**18):
        size_bytes += len(part)
        if size_bytes > MAX_ANSWER_BYTES:
            raise WorkerAnswerUnusable(f"{url} answered more than {MAX_ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
