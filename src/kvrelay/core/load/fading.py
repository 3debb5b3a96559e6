"""Sums in which newer things weigh more: growing the new summand is the same as letting all old ones decay.

Whoever keeps such sums adds `weight(now)` times what is new, and first multiplies all of them by `overdue(now)` when
there is such a factor: weights would grow without end otherwise.
"""

from __future__ import annotations


class Fading:
    """The clock of sums that fade."""

    def __init__(self, *, half_life_s: float, rescale_s: float) -> None:
        self._half_life_s = half_life_s
        self._rescale_s = rescale_s
        self._from_s = 0.0

    def overdue(self, now: float) -> float | None:
        """What all sums are to be multiplied by before anything is added; None: nothing needs to be done yet."""
        if now - self._from_s <= self._rescale_s:
            return None
        factor: float = 2.0 ** ((self._from_s - now) / self._half_life_s)
        self._from_s = now
        return factor

    def weight(self, at: float) -> float:
        """Of what is added at that time, or was: what is left of it by now is this, in today's units."""
        weight: float = 2.0 ** ((at - self._from_s) / self._half_life_s)
        return weight
