"""How fast does each worker prefill? Learned from its own first tokens, in tokens per second.

While a worker has prefill to do, the tokens it finishes divided by the time that passes is its rate, queueing and
batching included. Both sums decay per finished prefill, so the rate follows a change within some twenty requests.
Prompts that were nearly all cached say little about speed and much about overhead; below `_MIN_SAMPLE_TOKENS` they
are left out.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.model.arrays import Floats

_DECAY = 0.9
_MIN_SAMPLE_TOKENS = 128
_TEACHES_OTHERS = 3  # of a slot's first samples; after that it speaks for itself
_MAX_PROGRESS = 0.8  # of a backlog may be presumed done; a worker that hangs must not look idle


class _Rate(Struct):
    """What one slot taught us."""

    tokens_per_s: float
    samples: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    since: float = 0.0  # the backlog has been worked on since then


class PrefillRates:
    """Rates per slot. A slot starts from the fleet's mean once there is one."""

    def __init__(self, *, initial_tokens_per_s: float) -> None:
        self._initial = initial_tokens_per_s
        self._rates: list[_Rate] = []
        self._table: Floats = np.zeros((2, 0))  # tokens_per_s and since, for scorers
        self._changed: dict[int, None] = {}

    def add_slot(self, slot: int) -> None:
        """Start a slot; with what the others taught us, if anything."""
        if slot == len(self._rates):
            self._rates.append(_Rate(self._initial))
            self._table = np.hstack([self._table, np.zeros((2, 1))])
        self._rates[slot] = _Rate(self._initial)
        self._changed[slot] = None
        self._presume()

    def _presume(self) -> None:
        """Of a slot that has shown nothing yet the same is expected as of the others: else the first one to answer
        would look quicker, or slower, than all the rest."""
        learned = [rate.tokens_per_s for rate in self._rates if rate.samples]
        if not learned:
            return
        mean = sum(learned) / len(learned)
        for slot, rate in enumerate(self._rates):
            if not rate.samples:
                rate.tokens_per_s = mean
                self._changed[slot] = None

    def of(self, slot: int) -> float:
        """Tokens per second of one slot."""
        return self._rates[slot].tokens_per_s

    def remaining(self, now: float, slot: int, backlog_tokens: float) -> float:
        """As `remaining_tokens`, for one slot."""
        rate = self._rates[slot]
        return backlog_tokens - min(rate.tokens_per_s * (now - rate.since), backlog_tokens * _MAX_PROGRESS)

    def samples(self, slot: int) -> int:
        """How many prefills the slot's rate was learned from."""
        return self._rates[slot].samples

    def backlog_grew(self, now: float, slot: int, *, was_empty: bool) -> None:
        """A prefill was booked; an idle worker starts on it now."""
        if was_empty:
            self._rates[slot].since = now
            self._changed[slot] = None

    def prefill_done(self, now: float, slot: int, tokens: int) -> None:
        """A first token came; `tokens` were computed for it."""
        rate = self._rates[slot]
        seconds, rate.since = now - rate.since, now
        self._changed[slot] = None
        if tokens < _MIN_SAMPLE_TOKENS:
            return
        # Of prompts that were batched together the first one brings all the time and the others only tokens.
        rate.tokens = rate.tokens * _DECAY + tokens
        rate.seconds = rate.seconds * _DECAY + max(seconds, 0.0)
        if rate.seconds > 0:
            rate.tokens_per_s = rate.tokens / rate.seconds
            rate.samples += 1
            if rate.samples <= _TEACHES_OTHERS:
                self._presume()

    def prefill_abandoned(self, now: float, slot: int) -> None:
        """A booked prefill will not finish; it teaches nothing."""
        self._rates[slot].since = now
        self._changed[slot] = None

    def table(self) -> Floats:
        """Two rows, one column per slot: tokens per second, and since when the backlog has been worked on."""
        for slot in self._changed:
            rate = self._rates[slot]
            self._table[0, slot] = rate.tokens_per_s
            self._table[1, slot] = rate.since
        self._changed.clear()
        return self._table


def remaining_tokens(backlog_tokens: Floats, tokens_per_s: Floats, working_s: Floats) -> Floats:
    """Backlog of each slot less what it should have computed since its last first token."""
    remaining: Floats = backlog_tokens - np.minimum(tokens_per_s * working_s, backlog_tokens * _MAX_PROGRESS)
    return remaining
