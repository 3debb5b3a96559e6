"""Reads the event stream of one answer and notes when its content came.

A chunk counts as content when something of the answer is in it: text, reasoning, or a part of a tool call. The chunk
that only names the role, the one that only says why it ended, and the one with the usage are none.
"""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

MAX_EVENT_BYTES = 1 << 20


class CachedTokens(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None


class Outcome(Struct, kw_only=True):
    """What the client saw; times are of its monotonic clock, in seconds."""

    sent_s: float
    written_s: float | None = None  # when the body was given to the socket
    ended_s: float = 0.0
    first_token_s: float | None = None
    token_times_s: list[float] = msgspec.field(default_factory=list)
    text: str = ""
    http_status: int | None = None
    worker: str | None = None
    receipt_id: str | None = None  # the gateway may give a request another id than we asked for
    usage: Usage | None = None
    finish_reason: str | None = None
    done: bool = False
    failure: str | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: tuple[Any, ...] | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        """The new part of the answer's text; a part of a tool call shows as a space."""
        if self.delta is None:
            return self.text or ""
        delta = self.delta
        text = delta.content or delta.reasoning_content or delta.reasoning or delta.refusal or ""
        return text or (" " if delta.tool_calls else "")


class _Chunk(Struct):
    choices: tuple[_Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


async def read_stream(content: aiohttp.StreamReader, outcome: Outcome) -> None:
    """Raises msgspec.DecodeError for an event that is not JSON."""
    pending = b""
    async for data in content.iter_any():
        now_s = time.monotonic()
        *events, pending = (pending + data.replace(b"\r\n", b"\n")).split(b"\n\n")
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
    for choice in chunk.choices:
        outcome.finish_reason = choice.finish_reason or outcome.finish_reason
    content = "".join(choice.content() for choice in chunk.choices)
    if content:
        if outcome.first_token_s is None:
            outcome.first_token_s = now_s
        outcome.token_times_s.append(now_s)
        outcome.text += content
    if chunk.usage is not None:
        outcome.usage = chunk.usage
