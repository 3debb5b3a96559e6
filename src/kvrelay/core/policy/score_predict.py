"""Scorer `predict`: expected milliseconds until the first token; the lowest wins.

    queue      prefill tokens booked there and not yet computed / the worker's learned prefill rate,
               plus what requests from elsewhere are likely to need
    compute    missing tokens / rate
    displaced  twice as much again: these tokens also delay whoever comes next to the worker
    growth     what the conversations that live there will still bring, see `load/growth.py`
    transfer   loading what lies in lower tiers
    decode     interference of running generations with prefill: a millisecond each

`displaced` is why a follower waits for the leader of a burst with a common new prefix: waiting there and computing
elsewhere take equally long, but only the latter costs the fleet a second prefill.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.load.growth import COMPUTED_AGAIN
from kvrelay.core.load.ledger import FOREIGN, GENERATING
from kvrelay.core.model.arrays import Floats
from kvrelay.core.policy.policy import Arrays, Row

_DISPLACED_SHARE = COMPUTED_AGAIN - 1.0
_TOLERANCE_SHARE, _TOLERANCE_MS = 0.05, 1.0


class PredictScorer:
    """Scores in milliseconds; see the module text."""

    name = "predict"
    best_is_lowest = True

    def scores(self, arrays: Arrays) -> Floats:
        """In place wherever it can be: for some hundred candidates a new array costs as much as the sum in it."""
        scores: Floats = arrays.prompt_tokens - arrays.reachable_tokens
        scores *= 1.0 + _DISPLACED_SHARE
        if arrays.backlog_tokens is not None:
            scores += arrays.backlog_tokens
        if arrays.growth_tokens is not None:
            scores += arrays.growth_tokens
        if arrays.foreign_prefill_tokens:
            scores += arrays.load[FOREIGN] * arrays.foreign_prefill_tokens
        scores /= arrays.prefill_tokens_per_s
        scores *= 1000.0
        if arrays.transfer_ms is not None:
            scores += arrays.transfer_ms
        scores += arrays.load[GENERATING]
        return scores

    def score(self, row: Row) -> float:
        work_tokens = (row.prompt_tokens - row.reachable_tokens) * (1.0 + _DISPLACED_SHARE)
        work_tokens += row.backlog_tokens
        work_tokens += row.growth_tokens
        work_tokens += row.foreign * row.foreign_prefill_tokens
        score = work_tokens / row.prefill_tokens_per_s * 1000.0 + row.transfer_ms
        return score + (row.active - row.queued + row.foreign)

    def terms(self, row: Row) -> Mapping[str, float]:
        ms_per_token = 1000.0 / row.prefill_tokens_per_s
        compute_ms = (row.prompt_tokens - row.reachable_tokens) * ms_per_token
        return {
            "queue_ms": (row.backlog_tokens + row.foreign * row.foreign_prefill_tokens) * ms_per_token,
            "compute_ms": compute_ms,
            "displaced_ms": compute_ms * _DISPLACED_SHARE,
            "growth_ms": row.growth_tokens * ms_per_token,
            "transfer_ms": row.transfer_ms,
            "decode_ms": float(row.active - row.queued + row.foreign),
        }

    def noise(self, best: float) -> float:
        """Learned rates differ by noise; within this distance, load decides and not the noise."""
        return best * _TOLERANCE_SHARE + _TOLERANCE_MS
