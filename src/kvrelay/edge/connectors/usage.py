"""Token counts in answers, in the words of OpenAI's APIs and of Anthropic's. Null and absent both mean: not said."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from kvrelay.core.model.prompt import Usage
from kvrelay.edge.system.unreadable import UNREADABLE

_DATA = b"data:"


class _Details(Struct):
    cached_tokens: int | None = None


class _Counts(Struct):
    """Completions and chats say `prompt_tokens`, responses and messages `input_tokens`; only messages count what was
    cached apart from it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Response(Struct):
    usage: _Counts | None = None


class _Answer(Struct):
    usage: _Counts | None = None
    response: _Response | None = None  # in events of /v1/responses

    @property
    def counts(self) -> _Counts | None:
        return self.usage if self.usage is not None or self.response is None else self.response.usage


_decode = msgspec.json.Decoder(_Answer).decode


def usage_from_body(body: bytes) -> Usage:
    try:
        return _usage(_decode(body).counts)
    except UNREADABLE:
        return Usage()


def usage_from_sse(tail: bytes) -> Usage:
    """From the last event that carries counts. Engines send them in the last chunk, so the search runs backwards."""
    end = len(tail)
    while (found := tail.rfind(b'"usage"', 0, end)) >= 0:
        start = tail.rfind(b"\n", 0, found) + 1
        usage = _usage_of_line(tail[start:].partition(b"\n")[0].strip())
        if usage is not None:
            return usage
        end = start
    return Usage()


def _usage_of_line(line: bytes) -> Usage | None:
    if not line.startswith(_DATA):
        return None
    try:
        counts = _decode(line[len(_DATA) :]).counts
    except UNREADABLE:
        return None
    return None if counts is None else _usage(counts)


def _usage(counts: _Counts | None) -> Usage:
    if counts is None:
        return Usage()
    if counts.input_tokens is None:
        return Usage(
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=_cached(counts.prompt_tokens_details),
        )
    read = counts.cache_read_input_tokens
    return Usage(
        prompt_tokens=counts.input_tokens + (read or 0) + (counts.cache_creation_input_tokens or 0),
        completion_tokens=counts.output_tokens,
        cached_tokens=_cached(counts.input_tokens_details) if read is None else read,
    )


def _cached(details: _Details | None) -> int | None:
    return None if details is None else details.cached_tokens
