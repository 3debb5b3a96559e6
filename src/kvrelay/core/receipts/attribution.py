"""Four gates: why was each eligible token that was not hit, not hit?

effective hit = same prefix x routed to the holder x still cached - cost of moving it. The gates are taken in that
order, each token falls at the first gate it does not pass, and for every request

    prefix + route + residency + transfer + actual hits = eligible tokens.
"""

from __future__ import annotations

from kvrelay.core.receipts.receipt import GateLoss


def attribute(
    *,
    eligible_tokens: int,
    best_known_tokens: int,
    claimed_fast_tokens: int,
    claimed_lower_tokens: int,
    actual_tokens: int,
) -> GateLoss:
    """Attribute the misses of one request.

    `best_known_tokens`: deepest match on any live worker at routing time. `claimed_fast_tokens`: what the chosen one
    was believed to have ready; `claimed_lower_tokens`: what it was believed to find in lower tiers beyond that. An
    engine that hit more than anybody claimed leaves only tokens that nobody held.
    """
    actual = min(actual_tokens, eligible_tokens)
    claimed = min(claimed_fast_tokens + claimed_lower_tokens, eligible_tokens)
    reached = max(claimed, actual)
    best = max(min(best_known_tokens, eligible_tokens), reached)
    lost_after_claim = reached - actual
    transfer = min(lost_after_claim, claimed - min(claimed_fast_tokens, claimed))
    return GateLoss(
        prefix=eligible_tokens - best,
        route=best - reached,
        residency=lost_after_claim - transfer,
        transfer=transfer,
    )
