"""Sticky session: the first turn goes round robin among healthy workers, later turns return to the same worker.

The binding itself is made by the router after a successful dispatch and lives in `routing/affinity.py`. Health beats
affinity: a session whose worker cannot be used is placed anew, and the reason says so.
"""

from __future__ import annotations

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.policy import Choice, Field
from kvrelay.core.policy.round_robin import RoundRobin


class Sticky:
    """Follows bindings, else round robin."""

    name = "sticky"
    needs_match = False
    needs_arrays = False
    takes_rows = False
    binds_sessions = True

    def __init__(self) -> None:
        self._round_robin = RoundRobin()

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice:
        if field.bound.slot is not None:
            return Choice(field.bound.slot, RouteReason.STICKY_BOUND)
        return Choice(self._round_robin.next_slot(field), why_not_bound(field))


def why_not_bound(field: Field) -> RouteReason:
    """The reason of a turn that returns to no worker."""
    if field.bound.broken is not None:
        return field.bound.broken
    return RouteReason.STICKY_FIRST if field.has_session else RouteReason.STICKY_NO_SESSION
