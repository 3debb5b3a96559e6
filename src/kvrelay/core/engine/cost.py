"""How long one engine step takes: stated rates, no measurement."""

from __future__ import annotations

from msgspec import Struct


class StepCost(Struct, frozen=True):
    """Prefill is bound by tokens, decode by the step: one decode step costs the same for one request and for many."""

    prefill_tokens_per_s: float = 8000.0
    decode_ms: float = 8.0
    overhead_ms: float = 0.2

    def duration_s(self, *, prefill_tokens: int, decode_requests: int) -> float:
        duration_s = self.overhead_ms / 1000.0 + prefill_tokens / self.prefill_tokens_per_s
        if decode_requests:
            duration_s += self.decode_ms / 1000.0
        return duration_s
