"""Answers with status 200 whose engine gave up: the status was sent before it knew, or it never learned to say so.

- vLLM being shut down takes new requests and answers `finish_reason: "abort"` without a token, while /health says 200.
- A stream of a failed engine, or of a failed load of KV, ends with an event `{"error": ...}` and then `[DONE]`.

Engines also report mistakes of the client in such an event; those are its own and no other worker would better them.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from kvrelay.edge.gateway.stream import has_output
from kvrelay.edge.system.unreadable import UNREADABLE

_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_ERROR_EVENT = re.compile(rb'(?:\A|\n)data: ?(\{"error"[^\n]*)')
CLIENTS_MISTAKES = range(400, 500)


class _Error(Struct):
    code: int | str | None = None


class _ErrorEvent(Struct):
    error: _Error


_decode_event = msgspec.json.Decoder(_ErrorEvent).decode


def gave_up_at_once(first: bytes) -> bool:
    """Of the first bytes of an answer, nothing of which the client has yet."""
    return (b'"abort"' in first or b'"error"' in first) and not has_output(first) and gave_up(first)


def gave_up(end: bytes) -> bool:
    """Of the last bytes of a stream. A plain search comes first: an expression tries every line of a long end."""
    if end.rfind(b'"abort"') >= 0 and _ABORTED.search(end):
        return True
    return end.rfind(b'"error"') >= 0 and any(_is_the_engines(found[1]) for found in _ERROR_EVENT.finditer(end))


def _is_the_engines(event: bytes) -> bool:
    try:
        code = _decode_event(event.strip()).error.code
    except UNREADABLE:
        return False
    return code not in CLIENTS_MISTAKES
