"""Scorer `weights`: a weighted sum in blocks; the highest wins.

    alpha x reusable blocks - beta x active prefill tokens - gamma x active decode blocks - delta x transfer ms

The weights have no natural values: they are calibrated on the operator's own trace and objective (`kvrelay tune`).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.load.ledger import DECODE, PREFILL
from kvrelay.core.model.arrays import Floats
from kvrelay.core.policy.policy import Field
from kvrelay.core.routing.settings import Weights


class WeightsScorer:
    """Scores in blocks; see the module text."""

    name = "weights"
    best_is_lowest = False

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def scores(self, field: Field) -> Floats:
        weights = self._weights
        scores = field.reachable_tokens * (weights.alpha / field.block_size_tokens)
        scores -= field.load[PREFILL] * weights.beta
        scores -= field.load[DECODE] * weights.gamma
        scores -= field.transfer_ms * weights.delta
        return scores

    def terms(self, field: Field, at: int) -> Mapping[str, float]:
        weights = self._weights
        return {
            "reuse_credit": float(field.reachable_tokens[at]) * (weights.alpha / field.block_size_tokens),
            "prefill_debit": -float(field.load[PREFILL, at]) * weights.beta,
            "decode_debit": -float(field.load[DECODE, at]) * weights.gamma,
            "transfer_debit": -float(field.transfer_ms[at]) * weights.delta,
        }

    def noise(self, best: float) -> float:
        return 0.0
