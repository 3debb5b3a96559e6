"""The load generator's side of one streaming completion."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds

SESSION_HEADER, REQUEST_HEADER = "x-session-id", "x-request-id"
WORKER_HEADER, RECEIPT_HEADER = "x-kvrelay-worker", "x-kvrelay-request-id"
MAX_EVENT_BYTES = 1 << 20


class Outcome(Struct, kw_only=True):
    """What the client saw; times are of its monotonic clock, in seconds."""

    sent_s: float
    ended_s: float = 0.0
    first_token_s: float | None = None
    token_times_s: list[float] = msgspec.field(default_factory=list)
    text: str = ""
    http_status: int | None = None
    worker: str | None = None
    receipt_id: str | None = None  # the gateway may give a request another id than we asked for
    usage: _Usage | None = None
    done: bool = False
    failure: str | None = None


class _CachedTokens(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Choice(Struct):
    text: str | None = None


class _Chunk(Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def completion_body(model: str, token_ids: TokenIds, max_tokens: int, *, cache_salt: str | None = None) -> bytes:
    """A request that takes exactly `max_tokens` tokens and reports its usage. A salt keeps it from all other caches."""
    salted = {} if cache_salt is None else {"cache_salt": cache_salt}
    return msgspec.json.encode(
        {
            **salted,
            "model": model,
            "prompt": np.asarray(token_ids).tolist(),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


class CompletionClient:
    """Sends streaming completions to one base URL. Nothing is retried here: what failed is reported as failed."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url.rstrip("/") + "/v1/completions"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> CompletionClient:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(self, body: bytes, *, request_id: str, session_id: str) -> Outcome:
        assert self._session is not None
        headers = {"content-type": "application/json", REQUEST_HEADER: request_id, SESSION_HEADER: session_id}
        outcome = Outcome(sent_s=time.monotonic())
        try:
            await self._exchange(self._session, body, headers, outcome)
        except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as problem:
            outcome.failure = f"{type(problem).__name__}: {problem}"
        outcome.ended_s = time.monotonic()
        return outcome

    async def _exchange(
        self, session: aiohttp.ClientSession, body: bytes, headers: Mapping[str, str], outcome: Outcome
    ) -> None:
        async with session.post(self._url, data=body, headers=headers) as response:
            outcome.http_status = response.status
            outcome.worker = response.headers.get(WORKER_HEADER)
            outcome.receipt_id = response.headers.get(RECEIPT_HEADER)
            if response.status != 200:
                outcome.failure = f"HTTP {response.status}"
                await response.read()
                return
            await _read_events(response.content, outcome)
        if outcome.failure is None and not outcome.done:
            outcome.failure = "the stream ended without [DONE]"


async def _read_events(content: aiohttp.StreamReader, outcome: Outcome) -> None:
    pending = b""
    async for data in content.iter_any():
        now_s = time.monotonic()
        *events, pending = (pending + data).split(b"\n\n")
        if len(pending) > MAX_EVENT_BYTES:
            outcome.failure = f"an event of more than {MAX_EVENT_BYTES} bytes"
            return
        for event in events:
            _take_event(event, now_s, outcome)


def _take_event(event: bytes, now_s: float, outcome: Outcome) -> None:
    if not event.startswith(b"data:"):
        return
    payload = event[5:].strip()
    if payload == b"[DONE]":
        outcome.done = True
        return
    chunk = _decode_chunk(payload)
    if chunk.error is not None:
        outcome.failure = "an error event in the stream"
    if chunk.choices:
        if outcome.first_token_s is None:
            outcome.first_token_s = now_s
        outcome.token_times_s.append(now_s)
        outcome.text += chunk.choices[0].text or ""
    if chunk.usage is not None:
        outcome.usage = chunk.usage
