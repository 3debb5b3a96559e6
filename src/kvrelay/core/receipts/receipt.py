"""The route receipt: one record per client request, claim and outcome side by side.

What is not known is null, never 0. `matched_*_at_route` is the index at decision time and is never rewritten; what the
engine then really hit stands beside it. There is no field that could hold prompt text, a key or a token id.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from kvrelay.core.model.place import Hop
from kvrelay.core.model.units import FallbackReason, Fault, IndexState, RouteReason, Status

MAX_CANDIDATES = 8


class Candidate(Struct, frozen=True):
    """One worker as the policy saw it. `terms` add up to `score` (in the unit that the policy names)."""

    worker: str
    incarnation: str
    rank: int
    matched_tokens: Mapping[str, int]  # per tier; `in_flight` for prompts still being computed there
    load: Mapping[str, float]
    terms: Mapping[str, float]
    score: float | None  # null where the policy does not score
    hop: Hop = Hop.UNKNOWN  # how far it was from the gateway


class Attempt(Struct, frozen=True):
    """One try on one worker. `fault` is null for the attempt whose response reached the client to its end.

    `continued`: it took up the stream of the attempt before it, so the client has a part of each.
    """

    attempt: int
    worker: str
    incarnation: str
    rank: int
    reason: RouteReason
    started_ms: float  # after arrival
    fault: Fault | None = None
    http_status: int | None = None
    detail: str | None = None
    continued: bool = False


class GateLoss(Struct, frozen=True):
    """Eligible tokens that were not hit, each attributed to exactly one gate.

    prefix: nobody held them. route: another worker held them. residency: the chosen worker was believed to hold them
    and did not any more. transfer: they lay in another tier and were not loaded.
    """

    prefix: int
    route: int
    residency: int
    transfer: int

    @property
    def total(self) -> int:
        return self.prefix + self.route + self.residency + self.transfer


class Receipt(Struct, frozen=True, kw_only=True):
    """One JSON line. Units are in the names; see the module text for null."""

    request_id: str
    session_id: str | None
    tenant: str
    epoch: str | None = None  # of its keys; equal ones may share KV, different ones never do
    path: str
    model: str | None
    prefix_fingerprint: str | None
    policy: str
    eligible_prefix_blocks: int | None
    eligible_prefix_tokens: int | None
    block_size: int | None
    chosen_worker: str | None
    incarnation: str | None
    rank: int | None
    matched_blocks_at_route: int | None
    matched_tokens_at_route: int | None
    matched_tiers_at_route: Mapping[str, int] | None
    worker_queue_at_route: int | None
    load_snapshot: int | None  # number of the ledger state that the decision saw
    route_reason: RouteReason
    spilled_from: str | None
    candidates_total: int
    candidates: tuple[Candidate, ...] = ()
    index_state: IndexState | None = None
    unscored_because: str | None = None
    attempts: tuple[Attempt, ...] = ()
    actual_local_hits: int | None = None  # blocks
    actual_cached_tokens: int | None = None
    remote_outcome: str | None = None  # `hit`, `none` (nothing was to be loaded), or what was wrong with it
    remote_reason: str | None = None  # why nothing was loaded, or not all
    remote_loaded_tokens: int | None = None  # of `actual_cached_tokens`: verified and used, not what was planned
    remote_bytes_read: int | None = None
    cached_tokens_by_scope: Mapping[str, int] | None = None  # engine, host, cluster, persistent: how far they came
    contract_differs: tuple[str, ...] = ()  # fields in which others that use the same store differ from this worker
    remote_path_ms: Mapping[str, float] = field(default_factory=dict)
    gate_loss_tokens: GateLoss | None = None
    arrived_ms: float | None = None  # host's monotonic clock
    router_queue_ms: float | None = None  # wait for a free place before routing; null when it was never routed
    deadline_ms: float | None = None  # what was left of the client's time for a first token
    over_deadline_ms: Mapping[str, float] = field(default_factory=dict)  # passed over for it: the time expected there
    ttft_ms: float | None = None
    itl_ms: tuple[float, ...] = ()
    e2e_ms: float | None = None
    decision_us: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    status: Status
    http_status: int | None = None
    failure_reason: str | None = None
    fallback_reason: FallbackReason | None = None
    migrations: int = 0  # times that a running stream went on at another worker; `chosen_worker` is the last one
    not_migrated_because: str | None = None  # of a broken stream, where `retry.migrate` is on
    not_retried_because: str | None = None  # why nobody else was asked after the last attempt had failed unseen
    engine: str | None = None
    models_payload: bool | None = None
    manifest_digest: str | None = None
