"""What passes by in a streamed answer: the first token, the gaps, and the end where the counts are.

Chunks are never parsed one by one; a search for the first text and the last few chunks are enough.
"""

from __future__ import annotations

import re
from collections import deque

MAX_GAPS = 512
TAIL_CHUNKS = 8
TAIL_BYTES = 64 * 1024

# A member that carries generated text (not empty), ids or a tool call. A chunk with only a role has none of them.
_FIRST_TOKEN = re.compile(
    rb'"(?:text|content|reasoning_content|reasoning|thinking|arguments|partial_json|delta)"\s*:\s*"[^"]'
    rb'|"(?:token_ids|tool_calls)"\s*:\s*\[\s*[^\]\s]'
)
# The last event of a stream: of completions and chats, of messages, of responses.
_LAST_EVENT = re.compile(
    rb"(?:\A|\n)(?:data: ?\[DONE\]"
    rb"|event: ?(?:message_stop|response\.(?:completed|incomplete|failed))\r?\ndata:[^\n]*)\s*\Z"
)
# Nothing but events of a completion or chat: others mean something without text, such as "your response has an id now".
_CHOICES_ONLY = re.compile(rb'(?:data: ?\{[^\n]*"choices"[^\n]*\r?\n\r?\n)+\Z')
_SAYS_MORE = re.compile(rb'"finish_reason"\s*:\s*"|"usage"\s*:\s*\{|"error"\s*:')
_OVERLAP_BYTES = 64  # a member can be cut in two by the network


def has_output(data: bytes) -> bool:
    """Whether something generated is in it."""
    return _FIRST_TOKEN.search(data) is not None


def says_nothing_yet(first: bytes) -> bool:
    """Whether the first bytes of a stream are whole events in which nothing is generated: a role, or the empty text of
    a token that is half a character. Another worker could say the same."""
    return _CHOICES_ONLY.match(first) is not None and _SAYS_MORE.search(first) is None and not has_output(first)


class StreamWatch:
    """One per streamed answer."""

    __slots__ = ("_carry", "_last_s", "_tail", "gaps_ms", "saw_token")

    def __init__(self) -> None:
        self.saw_token = False
        self.gaps_ms: list[float] = []
        self._last_s = 0.0
        self._carry = b""
        self._tail: deque[bytes] = deque(maxlen=TAIL_CHUNKS)

    def take(self, data: bytes, now_s: float) -> bool:
        """Note a chunk. True once: the first token is in it."""
        self._tail.append(data)
        if self.saw_token:
            if len(self.gaps_ms) < MAX_GAPS:
                self.gaps_ms.append(round((now_s - self._last_s) * 1000, 3))
            self._last_s = now_s
            return False
        if _FIRST_TOKEN.search(self._carry + data) is None:
            self._carry = (self._carry + data)[-_OVERLAP_BYTES:]
            return False
        self.saw_token = True
        self._carry = b""
        if self._last_s and len(self.gaps_ms) < MAX_GAPS:
            self.gaps_ms.append(round((now_s - self._last_s) * 1000, 3))
        self._last_s = now_s
        return True

    def go_on(self) -> None:
        """Another worker continues the stream. The gap in between is one that its client sees."""
        self.saw_token = False
        self._carry = b""
        self._tail.clear()

    def is_complete(self) -> bool:
        """Whether the worker has said all, though its body has not ended."""
        tail = self.tail()
        return tail.endswith((b"\n\n", b"\r\n\r\n")) and _LAST_EVENT.search(tail) is not None

    def tail(self) -> bytes:
        return b"".join(self._tail)[-TAIL_BYTES:]
