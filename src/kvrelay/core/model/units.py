"""Words for quantities that would otherwise be bare strings."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """Where a block lies, by medium and never by a product's L1/L2/L3."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"
    PEER = "peer"


class RouteReason(StrEnum):
    """Closed vocabulary of `route_reason` in receipts: why this worker was chosen."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_LOAD = "least_load"
    STICKY_FIRST = "sticky_first"
    STICKY_BOUND = "sticky_bound"
    STICKY_NO_SESSION = "sticky_no_session"
    STICKY_SPILL = "sticky_spill"
    AFFINITY_BROKEN_LOST = "affinity_broken_lost"
    AFFINITY_BROKEN_UNHEALTHY = "affinity_broken_unhealthy"
    AFFINITY_BROKEN_BUSY = "affinity_broken_busy"
    AFFINITY_BROKEN_UNAVAILABLE = "affinity_broken_unavailable"
    CACHE_PLUS_LOAD = "cache_plus_load"
    CACHE_SPILL = "cache_spill"
    CACHE_NO_MATCH = "cache_no_match"
    CACHE_NOT_SCORED = "cache_not_scored"
    CACHE_INDEX_UNUSABLE = "cache_index_unusable"
    TIE_BREAK = "tie_break"
    ONLY_CANDIDATE = "only_candidate"
    NOT_ROUTED = "not_routed"


class Trigger(StrEnum):
    """What changed so that KV from before must not be met again: why an epoch is rotated."""

    REVISION = "revision"
    TOKENIZER = "tokenizer"
    TEMPLATE = "template"
    ADAPTER = "adapter"
    TENANT_POLICY = "tenant_policy"


class Status(StrEnum):
    """Terminal status of one client request; exactly one per request."""

    OK = "ok"
    CLIENT_CANCELLED = "client_cancelled"
    CLIENT_ERROR = "client_error"
    REFUSED = "refused"
    WORKER_LOST = "worker_lost"
    TIMEOUT = "timeout"
    ERROR = "error"


class Fault(StrEnum):
    """What went wrong with one attempt, as the host observed it."""

    CONNECT = "connect"
    TLS = "tls"
    RESET = "reset"
    GARBAGE = "garbage"
    CONNECT_TIMEOUT = "connect_timeout"
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    IDLE_TIMEOUT = "idle_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    BACK_PRESSURE = "back_pressure"
    SERVER_ERROR = "server_error"
    NOT_CONTINUED = "not_continued"  # asked to continue another worker's stream, it answered something else


class FallbackReason(StrEnum):
    """Why the request was not handled by its first choice; null in a receipt when it was."""

    MIGRATED = "migrated"  # begun by one worker, continued by another
    RETRIED_ELSEWHERE = "retried_elsewhere"
    LAST_RESORT = "last_resort"  # nobody routable was left, so a suspended worker was tried
    DEADLINE = "deadline"  # the first choice would probably have been too late for the request
    AFFINITY_BROKEN = "affinity_broken"
    OVERLOADED_HOLDER = "overloaded_holder"
    NOT_SCORED = "not_scored"
    INDEX_UNUSABLE = "index_unusable"


DEADLINE_UNREACHABLE = "deadline_unreachable"
"""Failure reason of a request for whose first token nobody would be, or was, in time."""


class IndexState(StrEnum):
    """How far the residency index of one worker can be believed."""

    LIVE = "live"  # events in unbroken sequence since the incarnation began
    INCOMPLETE = "incomplete"  # joined late, or a gap could not be replayed: hits are missed, not invented
    APPROXIMATE = "approximate"  # no events: guessed from what was routed
    UNUSABLE = "unusable"  # nothing can match: no events where they were expected, or a foreign block size
