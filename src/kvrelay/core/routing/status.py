"""What the router would say of itself right now. Values only; safe to keep and to print."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kvrelay.core.model.units import IndexState
from kvrelay.core.routing.epochs import EpochState


class DriftStatus(Struct, frozen=True):
    """Claims against what the engine hit, in requests since the incarnation began; see `core/index/drift.py`."""

    compared: int
    over_claim: int  # claimed more than was hit, and no event explains it
    under_claim: int
    resyncs: int  # asked for because of these


class TargetStatus(Struct, frozen=True):
    """One rank of a worker."""

    rank: int
    block_size: int | None
    index_state: IndexState
    index_problem: str | None
    index_blocks: Mapping[str, int]  # per tier
    orphan_blocks: int
    active_requests: int
    queued_requests: int
    active_prefill_tokens: int
    active_decode_blocks: int
    foreign_requests: int
    reported_running: int | None
    reported_waiting: int | None
    reported_kv_usage_ratio: float | None
    prefill_tokens_per_s: float
    prefill_rate_samples: int
    next_event_seq: int | None
    drift: DriftStatus | None  # workers with events


class WorkerStatus(Struct, frozen=True):
    """One live worker."""

    name: str
    incarnation: str
    url: str
    engine: str
    models: tuple[str, ...]
    adapters: tuple[str, ...]
    role: str
    up: bool
    routable: bool
    standing: str  # routable | suspended | unreached | dead
    draining: bool
    retired: bool  # of a past epoch: it gets nothing more until it is restarted, or reset where that is enough
    targets: tuple[TargetStatus, ...]
    events: Mapping[str, int]


class RouterStatus(Struct, frozen=True):
    """The whole router."""

    policy: str
    scorer: str | None
    index_problem: str | None  # why the policy, which would match prompts, can match none on any worker
    live_requests: int
    queue_depth: int  # requests that wait for a free place
    sessions: int
    in_flight_prompts: int
    index_blocks: int
    spills: int
    late_events: int
    epochs: EpochState
    workers: tuple[WorkerStatus, ...]


class MatchCandidate(Struct, frozen=True):
    """One worker in the answer of a what-if question."""

    worker: str
    incarnation: str
    rank: int
    matched_tokens: int
    tiers: Mapping[str, int]
    load: Mapping[str, float]
    terms: Mapping[str, float]
    score: float | None


class MatchAnswer(Struct, frozen=True):
    """What the router would do with a request, without doing it."""

    chosen: str | None
    reason: str
    prompt_tokens: int | None
    unscored_because: str | None
    candidates: tuple[MatchCandidate, ...]
