"""Random dispatch: the baseline without any knowledge. The chance is the host's, so a seed reproduces a run."""

from __future__ import annotations

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.policy import Choice, Field


class Random:
    """Every candidate with equal probability."""

    name = "random"
    needs_match = False
    needs_arrays = False
    takes_rows = False
    binds_sessions = False

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice:
        return Choice(int(field.slots[field.draw % len(field.slots)]), RouteReason.RANDOM)
