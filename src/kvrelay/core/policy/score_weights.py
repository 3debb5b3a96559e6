"""Scorer `weights`: a weighted sum in blocks; the highest wins.

    alpha x reusable blocks - beta x active prefill tokens - gamma x active decode blocks - delta x transfer ms

The weights have no natural values: they are calibrated on the operator's own trace and objective (`kvrelay tune`).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.load.ledger import DECODE, PREFILL, Ledger
from kvrelay.core.model.arrays import Floats
from kvrelay.core.policy.policy import Field
from kvrelay.core.routing.settings import Weights


class WeightsScorer:
    """Scores in blocks; see the module text."""

    name = "weights"
    best_is_lowest = False

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def terms(self, now: float, field: Field, ledger: Ledger) -> Mapping[str, Floats]:
        weights = self._weights
        return {
            "reuse_credit": field.reachable_tokens * (weights.alpha / field.block_size_tokens),
            "prefill_debit": field.load[PREFILL] * -weights.beta,
            "decode_debit": field.load[DECODE] * -weights.gamma,
            "transfer_debit": field.transfer_ms * -weights.delta,
        }

    def noise(self, best: float) -> float:
        return 0.0
