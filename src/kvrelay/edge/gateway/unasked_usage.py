"""Token counts of streams whose clients did not ask for them: asked of the worker, taken out of its answer again.

Engines count a stream only for who sends `stream_options.include_usage`, and then send one event more, without choices,
before the end. The receipt needs the counts, the client must not see the difference:

- `asking` puts the question into the JSON text; every byte around it stays where it is;
- `UsageFilter` removes that one event, however the network cuts or joins it, and changes nothing else;
- `speaks_of_question` tells a refusal that its client would not understand: by a worker that does not know the
  question, or that repeats the body it got. The request is then sent again as it came.

What cannot be edited without doubt is left alone, and the receipt says that the counts are unknown.
"""

from __future__ import annotations

import re
from itertools import islice

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from kvrelay.edge.http.heads import Header
from kvrelay.edge.system.unreadable import UNREADABLE

MAX_PLACES = 4  # members of this name, the body's own one among them
MAX_HELD_BYTES = 16 * 1024  # no event with counts is that long

_QUESTION = b'{"include_usage":true}'
_NAME = b'"stream_options"'
_WORDS = (b"stream_options", b"include_usage")
_COUNTS = b'"prompt_tokens"'  # inside a text it would have escaped quotes
_BOUNDARIES = (b"\n\n", b"\r\n\r\n")
_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n")
_DATA = b"data:"


class _Options(Struct, forbid_unknown_fields=True):
    include_usage: bool
    continuous_usage_stats: bool | None = None


class _Body(Struct):
    stream_options: _Options


class _Event(Struct):
    choices: list[Raw]
    usage: dict[str, Raw] | None = None


_decode_options = msgspec.json.Decoder(_Options).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def leaves_usage_out(stream_options: Raw | UnsetType) -> bool:
    """Whether a stream with these options surely ends without counts.

    Options of other shapes are the worker's to understand or to refuse: engines differ in their defaults.
    """
    if stream_options is UNSET or bytes(stream_options) == b"null":
        return True
    try:
        return not _decode_options(stream_options).include_usage
    except UNREADABLE:
        return False


def asking(body: bytes, stream_options: bytes | None) -> bytes | None:
    """The body with the question in it. `stream_options` is what `leaves_usage_out` was asked about, None if absent.

    None: the place was not found.
    """
    if stream_options is None:
        end = body.rfind(b"}")
        return b"".join((body[:end], b",", _NAME, b":", _QUESTION, body[end:]))
    member = re.compile(re.escape(_NAME) + rb"\s*:\s*" + re.escape(stream_options))
    for place in islice(member.finditer(body), MAX_PLACES):
        edited = body[: place.end() - len(stream_options)] + _QUESTION + body[place.end() :]
        if _asks(edited):
            return edited
    return None


def _asks(body: bytes) -> bool:
    """Whether it was the body's own member that was edited, and not one of the same name further inside."""
    try:
        return _decode_body(body).stream_options.include_usage
    except UNREADABLE:
        return False


def speaks_of_question(answer: bytes) -> bool:
    """Whether a refusal would have been another one without the question."""
    return any(word in answer for word in _WORDS)


def editable(headers: list[Header]) -> bool:
    """Whether events can be taken out of a body with this head: not if it is compressed or its length declared."""
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"content-length" or (lowered == b"content-encoding" and value.strip().lower() != b"identity"):
            return False
    return True


class UsageFilter:
    """Takes the event with the counts out of one stream. Only whole events pass, but for very long ones."""

    __slots__ = ("_held", "usage_event")

    def __init__(self) -> None:
        self._held = b""
        self.usage_event = b""
        """What was taken out; empty until then."""

    def take(self, data: bytes) -> bytes:
        """What of the stream may pass now."""
        # Once per chunk of every stream; `in` would take thrice as long as `find`.
        if not self._held and data.find(_COUNTS) < 0 and data.endswith(_BOUNDARIES):
            return data
        return self._take_apart(self._held + data)

    def rest(self) -> bytes:
        """What was held back when the stream ended."""
        held, self._held = self._held, b""
        return b"" if self._is_usage(held) else held

    def _take_apart(self, data: bytes) -> bytes:
        passed: list[bytes] = []
        start = 0
        for boundary in _BOUNDARY.finditer(data):
            event = data[start : boundary.end()]
            start = boundary.end()
            if not self._is_usage(event):
                passed.append(event)
        tail = data[start:]
        if len(tail) <= MAX_HELD_BYTES:
            self._held = tail
        else:
            self._held = b""
            passed.append(tail)
        return b"".join(passed)

    def _is_usage(self, event: bytes) -> bool:
        """Whether this is the event that the question brought: counts, and no choice that they would belong to."""
        if _COUNTS not in event or not event.startswith(_DATA):
            return False
        try:
            read = _decode_event(event[len(_DATA) :])
        except UNREADABLE:
            return False
        if read.choices or read.usage is None:
            return False
        self.usage_event = event
        return True
