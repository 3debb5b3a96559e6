"""Token counts in OpenAI-shaped answers. Null and absent both mean that the engine did not say."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from kvrelay.core.model.prompt import Usage

_DATA = b"data:"


class _Details(Struct):
    cached_tokens: int | None = None


class _Counts(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(Struct):
    usage: _Counts | None = None


_decode = msgspec.json.Decoder(_Answer).decode


def usage_from_body(body: bytes) -> Usage:
    try:
        return _usage(_decode(body).usage)
    except msgspec.DecodeError:
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
        counts = _decode(line[len(_DATA) :]).usage
    except msgspec.DecodeError:
        return None
    return None if counts is None else _usage(counts)


def _usage(counts: _Counts | None) -> Usage:
    if counts is None:
        return Usage()
    details = counts.prompt_tokens_details
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        cached_tokens=None if details is None else details.cached_tokens,
    )
