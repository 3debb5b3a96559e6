"""Sticky session with spill: `sticky`, except that a turn does not queue behind a worker that is much too busy.

A worker is too busy when it has more requests in hand than `ratio` x the least busy candidate's + `requests` (`Spill`).
A turn whose worker is too busy, or full, is sent to another one and its session stays bound: the load passes, and the
history is still there. If the load lasts, the session's turns go to the same second worker as long as that one is not
too busy itself, since it has computed the history by then. First turns go round robin as in `sticky`, past workers that
are too busy.
"""

from __future__ import annotations

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.arrays import Floats
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.policy import Choice, Field, break_tie, least_busy, requests_in_hand, requests_term
from kvrelay.core.policy.round_robin import RoundRobin
from kvrelay.core.policy.sticky import why_not_bound
from kvrelay.core.routing.settings import Spill


class StickyLoad:
    """Follows bindings as long as their worker is not too busy, else the least busy candidate."""

    name = "sticky_load"
    needs_match = False
    needs_arrays = True
    takes_rows = False
    binds_sessions = True

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._round_robin = RoundRobin()

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice:
        requests = requests_in_hand(field)
        bound = field.bound
        if bound.slot is not None:
            if not self._too_busy(field, requests, bound.slot):
                return _choice(bound.slot, RouteReason.STICKY_BOUND, requests)
            return self._spilled(field, requests, bound.slot)
        if bound.broken is RouteReason.AFFINITY_BROKEN_BUSY:
            return self._spilled(field, requests, bound.away_from)
        slot = self._round_robin.next_slot(field)
        if self._too_busy(field, requests, slot):
            slot = _least_busy(field, requests)
        return _choice(slot, why_not_bound(field), requests)

    def _spilled(self, field: Field, requests: Floats, home_slot: int | None) -> Choice:
        slot = field.bound.second_slot
        if slot is None or self._too_busy(field, requests, slot):
            slot = _least_busy(field, requests)
        return _choice(slot, RouteReason.STICKY_SPILL, requests, spilled_from=home_slot)

    def _too_busy(self, field: Field, requests: Floats, slot: int) -> bool:
        limit = self._spill.ratio * float(requests.min()) + self._spill.requests
        return float(requests[field.slots.searchsorted(slot)]) > limit


def _least_busy(field: Field, requests: Floats) -> int:
    return int(field.slots[break_tie(least_busy(field, requests), field)])


def _choice(slot: int, reason: RouteReason, requests: Floats, spilled_from: int | None = None) -> Choice:
    return Choice(
        slot=slot,
        reason=reason,
        scores=requests,
        terms_of=requests_term,
        best_is_lowest=True,
        spilled_from=spilled_from,
    )
