"""How fast does each worker prefill? Learned from its own first tokens, in tokens per second.

While a worker has prefill to do, the tokens it finishes divided by the time that passes is its rate, queueing and
batching included. Both sums decay per finished prefill, so the rate follows a change within some twenty requests.
Prompts that were nearly all cached say little about speed and much about overhead; below `_MIN_SAMPLE_TOKENS` they
are left out.
"""

from __future__ import annotations

import numpy as np

from kvrelay.core.model.arrays import Floats, Ints

_DECAY = 0.9
_MIN_SAMPLE_TOKENS = 128
_MAX_PROGRESS = 0.8  # of a backlog may be presumed done; a worker that hangs must not look idle


class PrefillRates:
    """Rates per slot. `tokens_per_s` is read by the scorer; a slot starts from the fleet's mean once there is one."""

    def __init__(self, *, initial_tokens_per_s: float) -> None:
        self._initial = initial_tokens_per_s
        self.tokens_per_s: Floats = np.zeros(0)
        self.learned_samples: Ints = np.zeros(0, dtype=np.int64)
        self._tokens: Floats = np.zeros(0)
        self._seconds: Floats = np.zeros(0)
        self._since: Floats = np.zeros(0)  # the backlog has been worked on since then

    def add_slot(self, slot: int) -> None:
        """Start a slot; with what the others taught us, if anything."""
        if slot >= len(self.tokens_per_s):
            more = slot + 1 - len(self.tokens_per_s)
            for name in ("tokens_per_s", "learned_samples", "_tokens", "_seconds", "_since"):
                array = getattr(self, name)
                setattr(self, name, np.append(array, np.zeros(more, dtype=array.dtype)))
        learned = self.learned_samples > 0
        learned[slot] = False
        self.tokens_per_s[slot] = float(self.tokens_per_s[learned].mean()) if learned.any() else self._initial
        self.learned_samples[slot] = 0
        self._tokens[slot] = self._seconds[slot] = self._since[slot] = 0.0

    def backlog_grew(self, now: float, slot: int, *, was_empty: bool) -> None:
        """A prefill was booked; an idle worker starts on it now."""
        if was_empty:
            self._since[slot] = now

    def prefill_done(self, now: float, slot: int, tokens: int) -> None:
        """A first token came; `tokens` were computed for it."""
        seconds = now - self._since[slot]
        self._since[slot] = now
        if tokens < _MIN_SAMPLE_TOKENS:
            return
        # Of prompts that were batched together the first one brings all the time and the others only tokens.
        self._tokens[slot] = self._tokens[slot] * _DECAY + tokens
        self._seconds[slot] = self._seconds[slot] * _DECAY + max(seconds, 0.0)
        if self._seconds[slot] > 0:
            self.tokens_per_s[slot] = self._tokens[slot] / self._seconds[slot]
            self.learned_samples[slot] += 1

    def prefill_abandoned(self, now: float, slot: int) -> None:
        """A booked prefill will not finish; it teaches nothing."""
        self._since[slot] = now

    def remaining_tokens(self, now: float, slots: Ints, backlog_tokens: Floats, tokens_per_s: Floats) -> Floats:
        """Backlog of each slot less what it should have computed since its last first token."""
        done = tokens_per_s * (now - self._since.take(slots))
        remaining: Floats = backlog_tokens - np.minimum(done, backlog_tokens * _MAX_PROGRESS)
        return remaining
