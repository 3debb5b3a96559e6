"""What the closed vocabularies of receipts mean, in words for somebody who reads his first receipt."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.model.units import FallbackReason, RouteReason

REASONS: Mapping[RouteReason, str] = {
    RouteReason.ROUND_ROBIN: "it was the next one in turn",
    RouteReason.RANDOM: "it was drawn at random",
    RouteReason.LEAST_LOAD: "it had the least load",
    RouteReason.STICKY_FIRST: "the session was new and it was the next one in turn",
    RouteReason.STICKY_BOUND: "the session is bound to it",
    RouteReason.STICKY_NO_SESSION: "the request named no session and it was the next one in turn",
    RouteReason.STICKY_SPILL: "the worker that the session is bound to was too busy",
    RouteReason.AFFINITY_BROKEN_LOST: "the worker that the session was bound to is gone or was started anew",
    RouteReason.AFFINITY_BROKEN_UNHEALTHY: "the worker that the session was bound to is not healthy",
    RouteReason.AFFINITY_BROKEN_BUSY: "the worker that the session is bound to was full",
    RouteReason.AFFINITY_BROKEN_UNAVAILABLE: "the worker that the session is bound to could not take it",
    RouteReason.CACHE_PLUS_LOAD: "cached prompt and load, taken together, spoke for it",
    RouteReason.CACHE_SPILL: "whoever held more of the prompt was too busy",
    RouteReason.CACHE_NO_MATCH: "nobody held any of the prompt, so load decided",
    RouteReason.CACHE_NOT_SCORED: "the prompt could not be matched, so load decided",
    RouteReason.CACHE_INDEX_UNUSABLE: "no worker's index could match anything, so load decided",
    RouteReason.TIE_BREAK: "several were equally good, and load or the draw broke the tie",
    RouteReason.ONLY_CANDIDATE: "it was the only candidate",
    RouteReason.NOT_ROUTED: "no worker could take it",
}

FALLBACKS: Mapping[FallbackReason, str] = {
    FallbackReason.RETRIED_ELSEWHERE: "That was not its first choice: an earlier attempt failed",
    FallbackReason.MIGRATED: "Another worker had begun the answer and was lost in the middle of it",
    FallbackReason.LAST_RESORT: "Requests had failed there lately, but nobody better was left",
    FallbackReason.DEADLINE: "The first choice would probably have been too late for its deadline",
}
"""Those that the route reason does not tell."""

TERMS: Mapping[str, str] = {
    "queue_ms": "work that waits there already",
    "compute_ms": "computing the tokens that it does not hold",
    "displaced_ms": "how much that delays whoever comes next",
    "growth_ms": "what the conversations that began there will still bring",
    "transfer_ms": "loading blocks from other tiers, and the way there",
    "decode_ms": "answers being generated there at the same time",
    "reuse_credit": "blocks that need not be computed",
    "prefill_debit": "prefill work there",
    "decode_debit": "answers being generated there",
    "transfer_debit": "loading blocks from other tiers",
}
"""Terms of the scorers' sums; the name of each is the one in the receipt."""

GATES: Mapping[str, str] = {
    "prefix": "nobody held them",
    "route": "another worker held them",
    "residency": "the worker no longer held them",
    "transfer": "they lay in another tier",
}
