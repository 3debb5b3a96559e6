"""When the first token of a request is to be expected at a candidate, in milliseconds from now.

    what is booked there and not computed yet, and what requests from elsewhere are likely to need
    + what the candidate would have to compute of the prompt         both divided by its learned prefill rate
    + loading what lies in lower tiers
    + a millisecond for each running generation

These are the terms of the `predict` scorer that the request itself feels. What it costs others (`displaced`, `growth`)
decides where it goes, and does not delay its first token. Of a prompt whose length nobody knows only the queue counts.
"""

from __future__ import annotations

from kvrelay.core.load.ledger import FOREIGN, GENERATING
from kvrelay.core.model.arrays import Floats
from kvrelay.core.policy.policy import Arrays, Row


def first_token_ms(row: Row) -> float:
    """At one of few candidates."""
    tokens = row.prompt_tokens - row.reachable_tokens + row.backlog_tokens + row.foreign * row.foreign_prefill_tokens
    generating = row.active - row.queued + row.foreign
    return max(0.0, tokens) / row.prefill_tokens_per_s * 1000.0 + row.transfer_ms + generating


def first_token_ms_of_many(arrays: Arrays) -> Floats:
    """The same for each of many."""
    tokens: Floats = arrays.prompt_tokens - arrays.reachable_tokens
    if arrays.backlog_tokens is not None:
        tokens = tokens + arrays.backlog_tokens
    if arrays.foreign_prefill_tokens:
        tokens = tokens + arrays.load[FOREIGN] * arrays.foreign_prefill_tokens
    expected: Floats = tokens.clip(min=0.0) / arrays.prefill_tokens_per_s * 1000.0 + arrays.load[GENERATING]
    return expected if arrays.transfer_ms is None else expected + arrays.transfer_ms
