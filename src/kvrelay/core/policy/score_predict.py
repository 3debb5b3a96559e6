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

from kvrelay.core.load.ledger import ACTIVE, FOREIGN, QUEUED
from kvrelay.core.model.arrays import Floats
from kvrelay.core.policy.policy import Arrays

_DISPLACED_SHARE = 0.5
_DECODE_MS_PER_REQUEST = 1.0
_TOLERANCE_SHARE, _TOLERANCE_MS = 0.05, 1.0


class PredictScorer:
    """Scores in milliseconds; see the module text."""

    name = "predict"
    best_is_lowest = True

    def scores(self, arrays: Arrays) -> Floats:
        load = arrays.load
        foreign = load[FOREIGN]
        work_tokens = (arrays.prompt_tokens - arrays.reachable_tokens) * (1.0 + _DISPLACED_SHARE)
        if arrays.backlog_tokens is not None:
            work_tokens += arrays.backlog_tokens
        if arrays.foreign_prefill_tokens:
            work_tokens += foreign * arrays.foreign_prefill_tokens
        scores = work_tokens / arrays.prefill_tokens_per_s
        scores *= 1000.0
        if arrays.transfer_ms is not None:
            scores += arrays.transfer_ms
        scores += (load[ACTIVE] - load[QUEUED] + foreign) * _DECODE_MS_PER_REQUEST
        return scores

    def terms(self, arrays: Arrays, at: int) -> Mapping[str, float]:
        active, queued, _, _, foreign, _ = arrays.load[:, at].tolist()
        ms_per_token = 1000.0 / float(arrays.prefill_tokens_per_s[at])
        compute_ms = (arrays.prompt_tokens - float(arrays.reachable_tokens[at])) * ms_per_token
        booked_tokens = 0.0 if arrays.backlog_tokens is None else float(arrays.backlog_tokens[at])
        backlog_tokens = booked_tokens + foreign * arrays.foreign_prefill_tokens
        return {
            "queue_ms": backlog_tokens * ms_per_token,
            "compute_ms": compute_ms,
            "displaced_ms": compute_ms * _DISPLACED_SHARE,
            "transfer_ms": 0.0 if arrays.transfer_ms is None else float(arrays.transfer_ms[at]),
            "decode_ms": (active - queued + foreign) * _DECODE_MS_PER_REQUEST,
        }

    def noise(self, best: float) -> float:
        """Learned rates differ by noise; within this distance, load decides and not the noise."""
        return best * _TOLERANCE_SHARE + _TOLERANCE_MS
