"""Round robin: the control. Looks at neither session, cache nor load."""

from __future__ import annotations

from bisect import bisect_left

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.policy import Choice, Field


class RoundRobin:
    """The next candidate after the last one chosen, in order of slots."""

    name = "round_robin"
    needs_match = False
    needs_arrays = False
    takes_rows = False
    binds_sessions = False

    def __init__(self) -> None:
        self._last_slot = -1

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice:
        return Choice(self.next_slot(field), RouteReason.ROUND_ROBIN)

    def next_slot(self, field: Field) -> int:
        """Advance; a candidate that is missing this time keeps its place in the order."""
        slots = field.slots.data
        position = bisect_left(slots, self._last_slot + 1)
        self._last_slot = slots[position if position < len(slots) else 0]
        return self._last_slot
