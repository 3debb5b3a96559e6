"""Claims against outcomes, over many receipts. The difference is never clamped: a negative one is a finding too."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from kvrelay.core.receipts.receipt import Receipt


class Reconciled(Struct, frozen=True):
    """Totals over the receipts in which both sides are known, and how many had one side unknown."""

    receipts: int
    compared: int
    claim_unknown: int
    actual_unknown: int
    claimed_tokens: int
    actual_tokens: int
    eligible_tokens: int
    within_one_block: int
    stale_index_tokens: tuple[int, ...]  # claimed - actual per compared receipt, in order


def stale_index_tokens(receipt: Receipt) -> int | None:
    """claimed - actual: positive where the index believed too much, negative where it knew too little."""
    if receipt.matched_tokens_at_route is None or receipt.actual_cached_tokens is None:
        return None
    return receipt.matched_tokens_at_route - receipt.actual_cached_tokens


def reconcile(receipts: Iterable[Receipt]) -> Reconciled:
    """Compare all receipts that can be compared."""
    differences: list[int] = []
    total = claim_unknown = actual_unknown = claimed = actual = eligible = close = 0
    for receipt in receipts:
        total += 1
        claim_unknown += receipt.matched_tokens_at_route is None
        actual_unknown += receipt.actual_cached_tokens is None
        difference = stale_index_tokens(receipt)
        if difference is None:
            continue
        differences.append(difference)
        claimed += receipt.matched_tokens_at_route or 0
        actual += receipt.actual_cached_tokens or 0
        eligible += receipt.eligible_prefix_tokens or 0
        close += abs(difference) <= (receipt.block_size or 0)
    return Reconciled(
        receipts=total,
        compared=len(differences),
        claim_unknown=claim_unknown,
        actual_unknown=actual_unknown,
        claimed_tokens=claimed,
        actual_tokens=actual,
        eligible_tokens=eligible,
        within_one_block=close,
        stale_index_tokens=tuple(differences),
    )
