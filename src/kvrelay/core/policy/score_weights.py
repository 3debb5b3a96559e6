"""Scorer `weights`: a weighted sum in blocks; the highest wins.

    alpha x reusable blocks - beta x active prefill tokens - gamma x active decode blocks - delta x transfer ms

The weights have no natural values: they are calibrated on the operator's own trace and objective (`kvrelay tune`).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.load.ledger import DECODE, PREFILL
from kvrelay.core.model.arrays import Floats
from kvrelay.core.policy.policy import Arrays, Row
from kvrelay.core.routing.settings import Weights


class WeightsScorer:
    """Scores in blocks; see the module text."""

    name = "weights"
    best_is_lowest = False

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def scores(self, arrays: Arrays) -> Floats:
        weights = self._weights
        scores = arrays.reachable_tokens * (weights.alpha / arrays.block_size_tokens)
        scores -= arrays.load[PREFILL] * weights.beta
        scores -= arrays.load[DECODE] * weights.gamma
        if arrays.transfer_ms is not None:
            scores -= arrays.transfer_ms * weights.delta
        return scores

    def score(self, row: Row) -> float:
        weights = self._weights
        score = row.reachable_tokens * (weights.alpha / row.block_size_tokens)
        score -= row.prefill_tokens * weights.beta
        score -= row.decode_blocks * weights.gamma
        return score - row.transfer_ms * weights.delta

    def terms(self, row: Row) -> Mapping[str, float]:
        weights = self._weights
        return {
            "reuse_credit": row.reachable_tokens * (weights.alpha / row.block_size_tokens),
            "prefill_debit": -row.prefill_tokens * weights.beta,
            "decode_debit": -row.decode_blocks * weights.gamma,
            "transfer_debit": -row.transfer_ms * weights.delta,
        }

    def noise(self, best: float) -> float:
        return 0.0
