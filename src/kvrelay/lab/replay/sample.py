"""One measured request: raw, written as it ends, failures included."""

from __future__ import annotations

from msgspec import Struct


class Sample(Struct, frozen=True, kw_only=True):
    """Times are milliseconds of one monotonic clock that starts with the arm.

    Four moments of a request that has not left yet, in this order:

    - `planned_ms`: when the plan wanted it, whatever happened before;
    - `due_ms`: the same, or later when its session's previous turn (and the think time) took longer;
    - due + `held_ms`: when a cap on requests in flight let it go; without a cap it is never held;
    - `sent_ms`: when the generator handed it to its HTTP client, `written_ms` when the client wrote it to the socket.

    `ttft_ms` and `e2e_ms` count from when the request was *due*, the members with `_sent_` from when it left. If the
    two drift apart, the generator (or its cap) was the bottleneck and not the fleet.
    """

    arm: str
    policy: str
    repeat: int
    request_id: str
    session_id: str
    turn: int
    due_ms: float
    sent_ms: float
    ended_ms: float
    planned_ms: float | None = None
    held_ms: float = 0.0
    written_ms: float | None = None
    first_token_ms: float | None = None  # first chunk with content; a chunk that only names the role is none
    ttft_ms: float | None = None
    ttft_sent_ms: float | None = None
    itl_ms: tuple[float, ...] = ()  # gaps between chunks with content
    http_status: int | None = None
    worker: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # as the engine reported it
    finish_reason: str | None = None
    answer_digest: str | None = None  # of its text: equal answers of two arms have equal ones
    phase: str = ""  # of a replay in blocks (cold, warm, restart), else empty
    failure: str | None = None  # null: answered to its end

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def without_content(self) -> bool:
        """Answered to its end, but with nothing in it: it has no TTFT and is counted on its own."""
        return self.ok and self.first_token_ms is None

    @property
    def e2e_ms(self) -> float:
        return round(self.ended_ms - self.due_ms, 3)

    @property
    def e2e_sent_ms(self) -> float:
        return round(self.ended_ms - self.sent_ms, 3)

    @property
    def lateness_ms(self) -> float:
        """From when it was due to when it left: by a cap or by a busy generator."""
        return round(self.sent_ms - self.due_ms, 3)

    @property
    def skew_ms(self) -> float:
        """The generator's own part of the lateness."""
        return round(self.sent_ms - self.due_ms - self.held_ms, 3)
