"""Cache and load: the candidate where the answer will begin soonest, by one of two scorers.

A worker that holds the prefix but is overloaded loses to one that must compute a little more (a spill); how much a
worker has cached that this prompt cannot use plays no part. Where nothing can match, this is a load policy and the
reason says so: never a silent cache-aware policy without a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.policy import Arrays, Choice, Field, break_tie


class Scorer(Protocol):
    """Scores all candidates at once, and accounts for the score of any one of them."""

    name: str
    best_is_lowest: bool

    def scores(self, arrays: Arrays) -> Floats:
        """One per candidate."""
        ...

    def terms(self, arrays: Arrays, at: int) -> Mapping[str, float]:
        """The named summands of `scores(arrays)[at]`."""
        ...

    def noise(self, best: float) -> float:
        """How far from the best score a candidate still counts as equally good."""
        ...


class CacheLoad:
    """Best score, ties by load and then by the draw."""

    name = "cache_load"
    needs_match = True
    needs_arrays = True
    binds_sessions = False

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice:
        arrays = field.arrays
        assert arrays is not None
        scores = self.scorer.scores(arrays)
        reachable = arrays.reachable_tokens
        tied = self._tied(scores, reachable)
        position = break_tie(tied, field)
        spilled_from = _holder_passed_over(field, reachable, position)
        return Choice(
            slot=int(field.slots[position]),
            reason=self._reason(field, reachable, len(tied), position, spilled_from is not None),
            scores=scores,
            terms_of=partial(self.scorer.terms, arrays),
            best_is_lowest=self.scorer.best_is_lowest,
            spilled_from=spilled_from,
        )

    def _tied(self, scores: Floats, reachable: Floats) -> Ints:
        """The best score, and whoever is no further from it than the scorer's noise and needs as little computing."""
        if self.scorer.best_is_lowest:
            best = float(scores[scores.argmin()])
            noise = self.scorer.noise(abs(best))
            tied: Ints = (scores <= best + noise).nonzero()[0]
        else:
            best = float(scores[scores.argmax()])
            noise = self.scorer.noise(abs(best))
            tied = (scores >= best - noise).nonzero()[0]
        if noise and len(tied) > 1:
            matched = reachable[tied]
            tied = tied[matched == matched[matched.argmax()]]
        return tied

    def _reason(self, field: Field, reachable: Floats, tied: int, position: int, spilled: bool) -> RouteReason:
        if len(field.slots) == 1:
            return RouteReason.ONLY_CANDIDATE
        if not field.index_usable:
            return RouteReason.CACHE_INDEX_UNUSABLE
        if not field.scored:
            return RouteReason.CACHE_NOT_SCORED
        if spilled:
            return RouteReason.CACHE_SPILL
        if tied > 1:
            return RouteReason.TIE_BREAK
        return RouteReason.CACHE_PLUS_LOAD if reachable[position] else RouteReason.CACHE_NO_MATCH


def _holder_passed_over(field: Field, reachable: Floats, position: int) -> int | None:
    """The slot with the best match when the chosen one has a worse one: its load sent the request away."""
    best = int(reachable.argmax())
    return int(field.slots[best]) if reachable[best] > reachable[position] else None
