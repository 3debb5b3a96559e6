"""A client of a drill over HTTP: it sends one streaming completion and writes down what comes, whatever it is."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import aiohttp
import msgspec
from msgspec import Struct

from kvrelay.lab.drills.drill import Turn
from kvrelay.lab.drills.reference import tenant_key

PATIENCE_S = 60.0
SESSION_HEADER, REQUEST_HEADER, WORKER_HEADER = "x-session-id", "x-request-id", "x-kvrelay-worker"


class Seen(Struct, kw_only=True):
    """What the client got. Times are of `time.monotonic()`."""

    sent_s: float
    ended_s: float = 0.0
    first_token_s: float | None = None
    ending: Literal["ok", "refused", "broken", "left"] = "broken"
    http_status: int | None = None
    text: str = ""
    worker: str | None = None
    life: str | None = None  # as a mock worker says of itself
    cached_tokens: int | None = None
    wrong_reuse_blocks: int | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens_details: _Details | None = None


class _Choice(Struct):
    text: str | None = None


class _Mark(Struct):
    incarnation: str | None = None
    wrong_reuse_blocks: int | None = None


class _Chunk(Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None
    kvrelay_mock: _Mark | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def body_of(turn: Turn, model: str, *, as_ids: bool) -> bytes:
    members: dict[str, Any] = {
        "model": turn.adapter or model,
        "prompt": turn.text.token_ids().tolist() if as_ids else turn.text.letters(),
        "max_tokens": turn.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(members)


async def complete(http: aiohttp.ClientSession, url: str, turn: Turn, model: str, *, as_ids: bool = True) -> Seen:
    """Never raises for what the other side does."""
    seen = Seen(sent_s=time.monotonic())
    try:
        async with asyncio.timeout(turn.leaves_after_s or PATIENCE_S):
            await _exchange(http, url, turn, body_of(turn, model, as_ids=as_ids), seen)
    except TimeoutError:
        seen.ending = "left"
    except (aiohttp.ClientError, ConnectionError, msgspec.DecodeError):
        seen.ending = "broken"
    seen.ended_s = time.monotonic()
    return seen


async def _exchange(http: aiohttp.ClientSession, url: str, turn: Turn, body: bytes, seen: Seen) -> None:
    headers = {"content-type": "application/json", REQUEST_HEADER: turn.id}
    if turn.tenant is not None:
        headers["authorization"] = f"Bearer {tenant_key(turn.tenant)}"
    if turn.session is not None:
        headers[SESSION_HEADER] = turn.session
    async with http.post(f"{url}/v1/completions", data=body, headers=headers) as response:
        seen.http_status = response.status
        seen.worker = response.headers.get(WORKER_HEADER)
        if response.status != 200:
            seen.ending = "refused"
            await response.read()
            return
        pending = b""
        async for data in response.content.iter_any():
            *events, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                _take(event, seen)


def _take(event: bytes, seen: Seen) -> None:
    if not event.startswith(b"data:"):
        return
    payload = event[5:].strip()
    if payload == b"[DONE]":
        seen.ending = "broken" if seen.ending == "refused" else "ok"
        return
    chunk = _decode(payload)
    if chunk.error is not None:
        seen.ending = "refused"  # and broken, once the stream says that it is at its end
    for choice in chunk.choices:
        if choice.text:
            seen.first_token_s = seen.first_token_s or time.monotonic()
            seen.text += choice.text
    if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
        seen.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
    if chunk.kvrelay_mock is not None:
        seen.life = chunk.kvrelay_mock.incarnation
        seen.wrong_reuse_blocks = chunk.kvrelay_mock.wrong_reuse_blocks
