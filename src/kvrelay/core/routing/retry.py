"""How often may a request be tried again? Bounded per request and, against retry storms, over the fleet.

The budget is a bucket: every first attempt adds `budget_ratio`, every second one, every retry takes one, and it holds a
hundred at most, with which it begins. So in any stretch of time retries <= budget_ratio x first attempts + seconds +
100, but for those that are free: they ask of the others what another worker has just ceased to do. A request that was
not taken is one, and so is each of the many that break with a worker that was given up before it broke: a death is one
failure, however much was in hand. Who is sent to a worker later, and fails there, pays.
"""

from __future__ import annotations

from kvrelay.core.model.units import Fault

_MOST_SAVED, _REFILL_PER_S = 100.0, 1.0
UNTOUCHED = frozenset({Fault.BACK_PRESSURE, Fault.CONNECT})
"""The worker did nothing for the request."""

_FINAL = frozenset({Fault.TOTAL_TIMEOUT, Fault.IDLE_TIMEOUT})


class Retry:
    """A budget that first attempts fill and retries spend."""

    def __init__(self, *, attempts: int, budget_ratio: float) -> None:
        self._attempts = attempts
        self._budget_ratio = budget_ratio
        self._saved = _MOST_SAVED if budget_ratio else 0.0  # a ratio of 0 means none at all
        self._refilled_at = 0.0

    def change(self, *, attempts: int, budget_ratio: float) -> None:
        """New limits from now on; what was saved stays, unless nothing may be spent any more."""
        self._attempts = attempts
        self._budget_ratio = budget_ratio
        if not budget_ratio:
            self._saved = 0.0

    def first_attempt(self) -> None:
        self._saved = min(_MOST_SAVED, self._saved + self._budget_ratio)

    def hindrance(
        self, now: float, *, attempts_made: int, fault: Fault, relayed: bool = False, free: bool = False
    ) -> str | None:
        """Why this request may not be sent to another worker; None: it may. Does not spend anything.

        `free`: it would not be a burden. `relayed`: a part of the answer went to the client; whether the rest can come
        from somebody else is not asked here (`migration.py`), only whether there is time, an attempt and budget left.
        """
        if fault is Fault.TOTAL_TIMEOUT or (fault in _FINAL and not relayed):
            return "time_over"
        if attempts_made >= self._attempts:
            return "attempts_used_up"
        self._refill(now)
        return None if free or self._saved >= 1.0 else "budget_spent"

    def spend(self) -> None:
        self._saved -= 1.0

    def _refill(self, now: float) -> None:
        elapsed_s, self._refilled_at = now - self._refilled_at, now
        if self._budget_ratio:
            self._saved = min(_MOST_SAVED, self._saved + elapsed_s * _REFILL_PER_S)
