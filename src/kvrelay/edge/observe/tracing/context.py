"""W3C trace context: which trace a request belongs to, and the header lines that pass it on to a worker."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.DOTALL)
_PARTS = 4  # of each header
_SAMPLED = 0x01


class Parent(Struct, frozen=True):
    """What the client said."""

    trace_id: int
    span_id: int
    sampled: bool


class Trace(Struct):
    """One sampled request that has not ended; spans of attempts by their number."""

    trace_id: int
    span_id: int
    parent: Parent | None
    attempts: dict[int, int]


def parent_of(parts: Sequence[bytes]) -> Parent | None:
    """`parts` are headers as the gateway joins them: name, colon, value, line end, and so on.

    None where there is no context, or none that is one.
    """
    at = _place(parts)
    match = None if at is None else _TRACEPARENT.fullmatch(parts[at + 2].strip())
    if match is None:
        return None
    trace_id, span_id = int(match[1], 16), int(match[2], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(match[3], 16) & _SAMPLED))


def without_parent(parts: Sequence[bytes]) -> Sequence[bytes]:
    """Other members of the context, such as `tracestate`, stay."""
    at = _place(parts)
    return parts if at is None else [*parts[:at], *parts[at + _PARTS :]]


def _place(parts: Sequence[bytes]) -> int | None:
    return next((at for at in range(0, len(parts), _PARTS) if parts[at].lower() == b"traceparent"), None)


def traceparent_line(trace_id: int, span_id: int) -> bytes:
    return b"traceparent: 00-%032x-%016x-01\r\n" % (trace_id, span_id)
