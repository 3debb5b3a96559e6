"""One measured request: raw, written as it ends, failures included."""

from __future__ import annotations

from msgspec import Struct


class Sample(Struct, frozen=True, kw_only=True):
    """Times are milliseconds of the arm's own clock, which starts with the first due turn.

    `ttft_ms` counts from when the request was *due*; `ttft_sent_ms` from when it left. If the two drift apart, the
    generator was the bottleneck and not the fleet.
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
    ttft_ms: float | None = None
    ttft_sent_ms: float | None = None
    itl_ms: tuple[float, ...] = ()
    http_status: int | None = None
    worker: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # as the engine reported it
    failure: str | None = None  # null: answered to its end

    @property
    def ok(self) -> bool:
        return self.failure is None
