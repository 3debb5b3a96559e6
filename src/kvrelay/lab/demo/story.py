"""One request's receipt in words: the one from which a reader learns most."""

from __future__ import annotations

from kvrelay.core.model.units import RouteReason
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.observe.explain import explain
from kvrelay.lab.demo.arm import is_primer
from kvrelay.lab.demo.demo import Measured

TELLING_POLICY = "cache_load"


def receipt_in_words(measured: Measured) -> str:
    receipt = telling_receipt(measured)
    return "No request was answered with a receipt." if receipt is None else explain(receipt)


def telling_receipt(measured: Measured) -> Receipt | None:
    """Of the cache-aware policy where it took part: a request that gave up cached tokens for a shorter queue, else
    one whose claim missed the outcome most, else the biggest hit."""
    receipts = [receipt for receipt in measured.receipts() if not is_primer(receipt)]
    cache_aware = [receipt for receipt in receipts if receipt.policy == TELLING_POLICY]
    return max(cache_aware or receipts, key=_lesson, default=None)


def _lesson(receipt: Receipt) -> tuple[int, int, int]:
    actual = receipt.actual_cached_tokens
    if actual is None or receipt.gate_loss_tokens is None:
        return (-1, -1, -1)
    spilled = receipt.route_reason == RouteReason.CACHE_SPILL
    given_up_tokens = receipt.gate_loss_tokens.route if spilled else 0
    return (given_up_tokens, abs((receipt.matched_tokens_at_route or 0) - actual), actual)
