"""A worker is called down or suspended for what speaks against it, and for nothing else.

A worker that answers "not now" (429, 503) is well and full. To take it for dead takes away capacity just when there is
too little of it, and is the way in which an overload becomes an outage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.core.model.effects import Effect, Report
from kvrelay.core.model.events import AttemptFailed, ClientLeft, Event, ProbeAnswered
from kvrelay.core.model.units import Fault
from kvrelay.lab.drills.fuzz.invariant import hold

_FOR_THE_WORSE = ("worker_down", "worker_suspended")
_NOT_ABOUT_HEALTH = frozenset({Fault.BACK_PRESSURE, Fault.NOT_CONTINUED})


class Standing:
    """Holds every change for the worse against the event that brought it about."""

    def __init__(self, tried: Mapping[str, Sequence[str]]) -> None:
        """`tried`: the workers that each request was sent to, by attempt; kept by whoever owns this."""
        self._tried = tried

    def after(self, event: Event, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Report) and effect.kind in _FOR_THE_WORSE:
                hold(
                    effect.worker == self._speaks_against(event),
                    f"{effect.kind} of {effect.worker} for what says nothing of its health: {effect.detail}",
                )

    def _speaks_against(self, event: Event) -> str | None:
        """Which worker, if any."""
        match event:
            case ProbeAnswered(ok=False):
                return event.worker.name
            case AttemptFailed() if event.fault not in _NOT_ABOUT_HEALTH:
                tried = self._tried.get(event.request_id, ())
                return tried[event.attempt - 1] if 0 < event.attempt <= len(tried) else None
            case ClientLeft():
                tried = self._tried.get(event.request_id, ())
                return tried[-1] if tried else None
            case _:
                return None
