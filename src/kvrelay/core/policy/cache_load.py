"""Cache and load: the candidate where the answer will begin soonest, by one of two scorers.

A worker that holds the prefix but is overloaded loses to one that must compute a little more (a spill); how much a
worker has cached that this prompt cannot use plays no part. Where nothing can match, this is a load policy and the
reason says so: never a silent cache-aware policy without a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.policy import Arrays, Choice, Field, Row, break_tie, break_tie_of_few


class Scorer(Protocol):
    """Scores candidates, all at once or one by one, and accounts for the score of any of them."""

    name: str
    best_is_lowest: bool

    def scores(self, arrays: Arrays) -> Floats:
        """One per candidate."""
        ...

    def score(self, row: Row) -> float:
        """The same for one of few, to the last bit."""
        ...

    def terms(self, row: Row) -> Mapping[str, float]:
        """The named summands of its score."""
        ...

    def noise(self, best: float) -> float:
        """How far from the best score a candidate still counts as equally good."""
        ...


class CacheLoad:
    """Best score, ties by load and then by the draw."""

    name = "cache_load"
    needs_match = True
    needs_arrays = True
    takes_rows = True
    binds_sessions = False

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice:
        if field.rows is not None:
            return self._of_few(field, field.rows)
        assert field.arrays is not None
        return self._of_many(field, field.arrays)

    def _of_few(self, field: Field, rows: Sequence[Row]) -> Choice:
        scorer = self.scorer
        scores = [scorer.score(row) for row in rows]
        best = min(scores) if scorer.best_is_lowest else max(scores)
        noise = scorer.noise(abs(best))
        tied = [at for at, score in enumerate(scores) if abs(score - best) <= noise]
        reachable = [row.reachable_tokens for row in rows]
        if noise and len(tied) > 1:
            most = max(reachable[at] for at in tied)
            tied = [at for at in tied if reachable[at] == most]
        at = break_tie_of_few(tied, rows, field.draw) if len(tied) > 1 else tied[0]
        deepest = reachable.index(max(reachable))
        return self._choice(field, at, scores, tied=len(tied), deepest=deepest, reachable=reachable)

    def _of_many(self, field: Field, arrays: Arrays) -> Choice:
        scores = self.scorer.scores(arrays)
        reachable = arrays.reachable_tokens
        tied = self._tied(scores, reachable)
        at = break_tie(tied, field)
        return self._choice(field, at, scores, tied=len(tied), deepest=int(reachable.argmax()), reachable=reachable)

    def _choice(
        self,
        field: Field,
        at: int,
        scores: Sequence[float] | Floats,
        *,
        tied: int,
        deepest: int,
        reachable: Sequence[float] | Floats,
    ) -> Choice:
        """A deeper match elsewhere means that its load sent the request away: a spill."""
        spilled = bool(reachable[deepest] > reachable[at])
        return Choice(
            slot=int(field.slots[at]),
            reason=_reason(field, tied=tied, spilled=spilled, matched=bool(reachable[at])),
            scores=scores,
            terms_of=self.scorer.terms,
            best_is_lowest=self.scorer.best_is_lowest,
            spilled_from=int(field.slots[deepest]) if spilled else None,
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


def _reason(field: Field, *, tied: int, spilled: bool, matched: bool) -> RouteReason:
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
    return RouteReason.CACHE_PLUS_LOAD if matched else RouteReason.CACHE_NO_MATCH
