"""What a stretch of traffic was like, as plain values: from the counters of a metrics page or from receipts.

None always means "not known". A percentile comes with its count, and one of too few values is not used.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Timed(Struct, frozen=True):
    """A median of waiting times and how many of them there were. `p50_s` is None where there were none."""

    p50_s: float | None
    count: int


class PromptClass(Struct, frozen=True):
    """Time to first token of prompts of about the same length: `warm` ones were hit to at least a half."""

    name: str
    warm: Timed
    cold: Timed


class WorkerWindow(Struct, frozen=True, kw_only=True):
    """One worker in that stretch."""

    name: str
    requests: int = 0
    active_requests: float | None = None  # at its end, as booked
    waiting_requests: float | None = None  # at its end, as the worker says
    claimed_tokens: float = 0.0
    stale_claim_tokens: float = 0.0
    orphan_blocks: float | None = None
    orphan_blocks_before: float | None = None  # at its beginning
    age_s: float | None = None  # of its present life, at the end


class Window(Struct, frozen=True, kw_only=True):
    """All of it. `hit_tokens` are of requests whose hits are known, and `eligible_tokens` of the same requests."""

    seconds: float | None  # None: since the gateway began
    requests: int
    failed: int = 0  # by no fault of the client
    eligible_tokens: float | None = None
    hit_tokens: float | None = None
    lost_tokens: Mapping[str, float] = {}  # by gate
    prompt_classes: tuple[PromptClass, ...] = ()
    remote_bytes: float | None = None  # that requests loaded from shared tiers
    open_breakers: tuple[str, ...] | None = None  # tiers out of use; None: there is no store
    workers: tuple[WorkerWindow, ...] = ()

    @property
    def hit_ratio(self) -> float | None:
        if not self.eligible_tokens or self.hit_tokens is None:
            return None
        return self.hit_tokens / self.eligible_tokens
