"""Least load: fewest tokens waiting to be prefilled, then fewest requests. Knows nothing of caches."""

from __future__ import annotations

import numpy as np

from kvrelay.core.load.ledger import ACTIVE, FOREIGN, PREFILL, Ledger
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.policy import Choice, Field, break_tie


class LeastLoad:
    """Fewest requests in hand; among those, the smallest backlog of prefill tokens."""

    name = "least_load"
    needs_match = False
    needs_arrays = True
    binds_sessions = False

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice:
        assert field.arrays is not None
        load = field.arrays.load
        requests, backlog = load[ACTIVE] + load[FOREIGN], load[PREFILL]
        fewest = np.flatnonzero(requests == requests.min())
        lightest = fewest[backlog[fewest] == backlog[fewest].min()]
        position = break_tie(lightest, field)
        reason = RouteReason.LEAST_LOAD if len(lightest) == 1 else RouteReason.TIE_BREAK
        return Choice(
            slot=int(field.slots[position]),
            reason=reason,
            scores=requests,
            terms_of=lambda at: {"requests": float(requests[at])},
            best_is_lowest=True,
        )
