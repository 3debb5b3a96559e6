"""One request's receipt in words: the one from which a reader learns most."""

from __future__ import annotations

from kvrelay.core.receipts.receipt import Candidate, Receipt
from kvrelay.edge.observe.explain import explain
from kvrelay.lab.arms.arm import is_primer
from kvrelay.lab.arms.measure import Measured

TELLING_POLICY = "cache_load"


def receipt_in_words(measured: Measured) -> str:
    receipt = telling_receipt(measured)
    return "No request was answered with a receipt." if receipt is None else explain(receipt)


def telling_receipt(measured: Measured) -> Receipt | None:
    """Of the cache-aware policy where it took part: the biggest hit on a worker that was not the least busy one, so
    that cache and load spoke against each other; else the biggest hit."""
    receipts = [receipt for receipt in measured.receipts() if not is_primer(receipt)]
    cache_aware = [receipt for receipt in receipts if receipt.policy == TELLING_POLICY]
    return max(cache_aware or receipts, key=_lesson, default=None)


def _lesson(receipt: Receipt) -> tuple[bool, int]:
    hit_tokens = receipt.actual_cached_tokens or 0
    return (hit_tokens > 0 and _passed_over_a_less_busy_one(receipt), hit_tokens)


def _passed_over_a_less_busy_one(receipt: Receipt) -> bool:
    chosen, *others = sorted(receipt.candidates, key=lambda one: one.worker != receipt.chosen_worker) or (None,)
    return chosen is not None and any(_work_tokens(other) < _work_tokens(chosen) for other in others)


def _work_tokens(candidate: Candidate) -> float:
    return candidate.load.get("active_prefill_tokens", 0.0)
