"""Least load: fewest requests in hand, then fewest tokens waiting to be prefilled. Knows nothing of caches."""

from __future__ import annotations

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.policy import Choice, Field, break_tie, least_busy, requests_in_hand, requests_term


class LeastLoad:
    """Fewest requests in hand; among those, the smallest backlog of prefill tokens."""

    name = "least_load"
    needs_match = False
    needs_arrays = True
    takes_rows = False
    binds_sessions = False

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice:
        requests = requests_in_hand(field)
        lightest = least_busy(field, requests)
        position = break_tie(lightest, field)
        reason = RouteReason.LEAST_LOAD if len(lightest) == 1 else RouteReason.TIE_BREAK
        return Choice(
            slot=int(field.slots[position]),
            reason=reason,
            scores=requests,
            terms_of=requests_term,
            best_is_lowest=True,
        )
