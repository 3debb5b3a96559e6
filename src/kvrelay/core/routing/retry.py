"""How often may a request be tried again? Bounded per request and, against retry storms, over the fleet."""

from __future__ import annotations

from kvrelay.core.model.units import Fault

_ALLOWANCE = 10.0
_MOST_SAVED = 100.0
_FINAL = frozenset({Fault.TOTAL_TIMEOUT, Fault.IDLE_TIMEOUT})


class Retry:
    """A budget that first attempts fill and retries spend."""

    def __init__(self, *, attempts: int, budget_ratio: float) -> None:
        self._attempts = attempts
        self._budget_ratio = budget_ratio
        self._saved = _ALLOWANCE

    def first_attempt(self) -> None:
        self._saved = min(_MOST_SAVED, self._saved + self._budget_ratio)

    def allows(self, *, attempts_made: int, fault: Fault, first_byte_relayed: bool, free: bool = False) -> bool:
        """May this request be sent to another worker? Does not spend anything. `free`: it would not be a burden."""
        if first_byte_relayed or fault in _FINAL:
            return False
        return attempts_made < self._attempts and (free or self._saved >= 1.0)

    def spend(self) -> None:
        self._saved -= 1.0
