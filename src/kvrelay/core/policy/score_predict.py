"""Scorer `predict`: expected milliseconds until the first token; the lowest wins.

    queue      prefill tokens booked there and not yet computed / the worker's learned prefill rate,
               plus what requests from elsewhere are likely to need
    compute    missing tokens / rate
    displaced  half of compute: these tokens also delay whoever comes next to the worker
    transfer   loading what lies in lower tiers
    decode     interference of running generations with prefill

`displaced` is why a follower waits for the leader of a burst with a common new prefix: waiting there and computing
elsewhere take equally long, but only the latter costs the fleet a second prefill.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.arrays import Floats
from kvrelay.core.policy.policy import Field

_DISPLACED_SHARE = 0.5
_DECODE_MS_PER_REQUEST = 1.0
_TOLERANCE_SHARE, _TOLERANCE_MS = 0.05, 1.0


class PredictScorer:
    """Scores in milliseconds; see the module text."""

    name = "predict"
    best_is_lowest = True

    def terms(self, now: float, field: Field, ledger: Ledger) -> Mapping[str, Floats]:
        active, queued, prefill_tokens, _, foreign = field.load
        ms_per_token = 1000.0 / field.prefill_tokens_per_s
        backlog = ledger.rates.remaining_tokens(now, field.slots, prefill_tokens, field.prefill_tokens_per_s)
        if ledger.any_foreign:
            backlog = backlog + foreign * ledger.mean_prefill_tokens(field.prompt_tokens)
        compute_ms = (field.prompt_tokens - field.reachable_tokens) * ms_per_token
        return {
            "queue_ms": backlog * ms_per_token,
            "compute_ms": compute_ms,
            "displaced_ms": compute_ms * _DISPLACED_SHARE,
            "transfer_ms": field.transfer_ms,
            "decode_ms": (active - queued + foreign) * _DECODE_MS_PER_REQUEST,
        }

    def noise(self, best: float) -> float:
        """Learned rates differ by noise; within this distance, load decides and not the noise."""
        return best * _TOLERANCE_SHARE + _TOLERANCE_MS
