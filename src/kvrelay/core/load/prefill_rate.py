"""How fast does each worker prefill? Learned from its own first tokens, in tokens per second.

While a worker has prefill to do, the tokens it finishes divided by the time that passes is its rate, queueing and
batching included. Both sums decay per finished prefill, so the rate follows a change within some twenty requests.
A pause is not a rate: when a worker, the network or this process stands still for a moment, one first token comes
very late. So the time of one sample counts up to some times what was to be expected, and who is slow shows it again.
Prompts that were nearly all cached say little about speed and much about overhead: below `_MIN_SAMPLE_TOKENS` they are
no sample, and their tokens and their time go into the next one of the same busy period. Left out altogether, they would
make the next prompt look as if it had been computed since the first token of theirs. What was computed is known at the
end only; where the engine had more cached than was claimed, the sample is taken back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvrelay.core.model.arrays import Floats

_DECAY = 0.9
_MIN_SAMPLE_TOKENS = 128
_NOISE = 0.35  # of the mean; learned rates that differ by less are taken for equal
_LEAST, _MOST = 1.0 - _NOISE, 1.0 + _NOISE
_SURPRISE = 4.0  # times the expected duration that one sample may count for
_TRUSTED_S = 10.0  # a slow rate is believed this long without a sample: who is avoided for it gets none
_MAX_PROGRESS = 0.8  # of a backlog may be presumed done; a worker that is late must not look idle


class _Rate(Struct):
    """What one slot taught us."""

    tokens_per_s: float
    samples: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    since: float = 0.0  # the backlog has been worked on since then
    unsampled_since: float = 0.0  # the time of the next sample begins
    unsampled_tokens: int = 0  # of prefills too short for a sample, since then
    sampled_at: float = 0.0

    def begin(self, now: float) -> None:
        """Whatever is computed from now on belongs to the next sample."""
        self.since = self.unsampled_since = now
        self.unsampled_tokens = 0


class Sample(Struct, frozen=True):
    """What one prefill taught: the `number`-th of its slot."""

    number: int
    tokens: int
    seconds: float


class PrefillRates:
    """Rates per slot, and what is to be expected of each.

    Expected is the fleet's mean, unless a slot has shown that it is quite another machine. What a rate was learned from
    (how prompts were batched, who else used the machine) makes those of equal machines differ by a quarter or so; a
    router that believed such differences would load one of two equal workers with half as much again as the other.
    """

    def __init__(self, *, initial_tokens_per_s: float) -> None:
        self._initial = initial_tokens_per_s
        self._rates: list[_Rate] = []
        self._learned_sum = 0.0  # over slots that have taught us anything
        self._learned = 0
        self._table: Floats = np.zeros((2, 0))  # learned tokens per second (NaN: nothing) and since when, per slot
        self._changed: dict[int, None] = {}

    def add_slot(self, slot: int) -> None:
        """Start a slot, of which nothing is known but what the others taught us."""
        if slot == len(self._rates):
            self._rates.append(_Rate(self._initial))
            self._table = np.hstack([self._table, np.zeros((2, 1))])
        elif self._rates[slot].samples:
            self._learned -= 1
            self._learned_sum -= self._rates[slot].tokens_per_s
        self._rates[slot] = _Rate(self._initial)
        self._changed[slot] = None

    def of(self, slot: int) -> float:
        """Tokens per second to be expected of one slot."""
        rate, mean = self._rates[slot], self._mean()
        if not rate.samples or mean * _LEAST <= rate.tokens_per_s <= mean * _MOST:
            return mean
        return rate.tokens_per_s

    def of_each(self, slots: Sequence[int]) -> list[float]:
        """As `of`, for some slots."""
        mean = self._mean()
        least, most, rates = mean * _LEAST, mean * _MOST, self._rates
        learned = [rates[slot].tokens_per_s if rates[slot].samples else mean for slot in slots]
        return [mean if least <= own <= most else own for own in learned]

    def learned(self, slot: int) -> float:
        """What the slot itself has shown, else what is expected of it."""
        rate = self._rates[slot]
        return rate.tokens_per_s if rate.samples else self._mean()

    def remaining(self, now: float, slot: int, backlog_tokens: float) -> float:
        """As `remaining_tokens`, for one slot that has a backlog."""
        done = self.of(slot) * (now - self._rates[slot].since)
        return max(backlog_tokens - min(done, backlog_tokens * _MAX_PROGRESS), done - backlog_tokens)

    def samples(self, slot: int) -> int:
        """How many prefills the slot's rate was learned from."""
        return self._rates[slot].samples

    def backlog_grew(self, now: float, slot: int, *, was_empty: bool) -> None:
        """A prefill was booked; an idle worker starts on it now."""
        if was_empty:
            self._rates[slot].begin(now)
            self._changed[slot] = None

    def prefill_done(self, now: float, slot: int, tokens: int, *, waiting_tokens: int = 0) -> Sample | None:
        """A first token came; `tokens` were computed for it, perhaps batched with `waiting_tokens` of others."""
        rate = self._rates[slot]
        rate.since = now
        self._changed[slot] = None
        if tokens < _MIN_SAMPLE_TOKENS:
            rate.unsampled_tokens += tokens
            return None
        tokens += rate.unsampled_tokens
        seconds = now - rate.unsampled_since
        rate.begin(now)
        if self._learned:
            seconds = min(seconds, _SURPRISE * (tokens + waiting_tokens) / self.of(slot))
        # Of prompts that were batched together the first one brings all the time and the others only tokens.
        seconds = max(seconds, 0.0)
        rate.tokens = rate.tokens * _DECAY + tokens
        rate.seconds = rate.seconds * _DECAY + seconds
        if rate.seconds <= 0:
            return None
        self._learn(rate)
        rate.samples += 1
        rate.sampled_at = now
        return Sample(rate.samples, tokens, seconds)

    def take_back(self, slot: int, sample: Sample) -> None:
        """It was not computed after all; what the slot has taught besides is all that counts. The last one stays."""
        rate = self._rates[slot]
        weight = _DECAY ** (rate.samples - sample.number)
        tokens, seconds = rate.tokens - sample.tokens * weight, rate.seconds - sample.seconds * weight
        if sample.number > rate.samples or tokens < _MIN_SAMPLE_TOKENS * _DECAY or seconds <= 0:
            return
        rate.tokens, rate.seconds = tokens, seconds
        self._learn(rate)
        self._changed[slot] = None

    def forget_old(self, now: float, slot: int) -> None:
        """A worker that was slow, and is idle, is tried again after a while: whatever slowed it may be over."""
        rate = self._rates[slot]
        if rate.samples and now - rate.sampled_at > _TRUSTED_S and rate.tokens_per_s < (1 - _NOISE) * self._mean():
            self.add_slot(slot)

    def prefill_abandoned(self, now: float, slot: int) -> None:
        """A booked prefill will not finish; it teaches nothing."""
        self._rates[slot].begin(now)
        self._changed[slot] = None

    def expected(self) -> Floats:
        """As `of`, for every slot. Made anew each time."""
        learned, mean = self._renewed()[0], self._mean()
        own = (learned < mean * _LEAST) | (learned > mean * _MOST)  # never so for NaN
        expected: Floats = np.where(own, learned, mean)
        return expected

    def working_since(self) -> Floats:
        """Per slot, since when its backlog has been worked on. Calculate with it, do not keep it."""
        since: Floats = self._renewed()[1]
        return since

    def _renewed(self) -> Floats:
        table = self._table
        for slot in self._changed:
            rate = self._rates[slot]
            table[0, slot] = rate.tokens_per_s if rate.samples else math.nan
            table[1, slot] = rate.since
        self._changed.clear()
        return table

    def _learn(self, rate: _Rate) -> None:
        """The rate is what its sums say, and a part of the mean."""
        if rate.samples:
            self._learned_sum -= rate.tokens_per_s
        else:
            self._learned += 1
        rate.tokens_per_s = rate.tokens / rate.seconds
        self._learned_sum += rate.tokens_per_s

    def _mean(self) -> float:
        return self._learned_sum / self._learned if self._learned else self._initial


def remaining_tokens(backlog_tokens: Floats, tokens_per_s: Floats, working_s: Floats) -> Floats:
    """Backlog of each slot less what it should have computed since its last first token.

    A worker that should have computed all of it, and has not given a single first token, stands still or is much slower
    than it was. Nobody knows for how long; the best guess is for as long again as it is late already.
    """
    done = tokens_per_s * working_s
    remaining: Floats = backlog_tokens - np.minimum(done, backlog_tokens * _MAX_PROGRESS)
    np.maximum(remaining, done - backlog_tokens, out=remaining, where=backlog_tokens > 0)
    return remaining
