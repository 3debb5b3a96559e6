"""May a worker be sent to? Two opinions, kept apart: what probes say, and what real requests went through.

A refused connection is proof enough to stop sending at once. Failures in serving count up to a threshold and then
suspend the worker for a time that doubles with every relapse, whatever its probes say: a worker that answers probes
and fails all requests must not flap. After a suspension one request at a time is let through as a trial. Client
errors and back-pressure say nothing about health.
"""

from __future__ import annotations

from enum import Enum, auto

from kvrelay.core.model.units import Fault

_FIRST_SUSPENSION_S, _LONGEST_SUSPENSION_S = 1.0, 30.0
_UNREACHABLE = frozenset({Fault.CONNECT, Fault.CONNECT_TIMEOUT})
_SAYS_NOTHING = frozenset({Fault.BACK_PRESSURE, Fault.TOTAL_TIMEOUT})


class Change(Enum):
    """Whether a worker's standing changed."""

    NONE = auto()
    WENT_UP = auto()
    WENT_DOWN = auto()


class Health:
    """Standing of one incarnation. A worker that has just described itself is up."""

    def __init__(self, *, failures_to_down: int, successes_to_up: int) -> None:
        self._failures_to_down = failures_to_down
        self._successes_to_up = successes_to_up
        self.up = True
        self._probe_failures = 0
        self._probe_successes = 0
        self._serving_failures = 0
        self._suspension_s = 0.0
        self._suspended_until: float | None = None
        self._trial: str | None = None

    def routable(self, now: float) -> bool:
        """May a new request be sent now? While suspended no; afterwards one trial at a time."""
        if not self.up:
            return False
        if self._suspended_until is None:
            return True
        return now >= self._suspended_until and self._trial is None

    @property
    def steady(self) -> bool:
        """Up and not suspended: `routable` will not change by time alone."""
        return self.up and self._suspended_until is None

    def dispatched(self, request_id: str) -> None:
        """A request goes there; after a suspension it is the trial."""
        if self._suspended_until is not None:
            self._trial = request_id

    def probed(self, ok: bool) -> Change:
        """A probe ended."""
        if ok:
            self._probe_failures = 0
            self._probe_successes += 1
            if not self.up and self._probe_successes >= self._successes_to_up:
                return self._set_up(True)
            return Change.NONE
        self._probe_successes = 0
        self._probe_failures += 1
        if self.up and self._probe_failures >= self._failures_to_down:
            return self._set_up(False)
        return Change.NONE

    def failed(self, now: float, request_id: str, fault: Fault) -> Change:
        """A request failed there."""
        old_news = self._is_old_news(request_id)
        self._end_trial(request_id)
        if fault in _SAYS_NOTHING:
            return Change.NONE
        if fault in _UNREACHABLE:
            self._probe_successes = 0
            return self._set_up(False)
        if old_news:
            return Change.NONE
        self._serving_failures += 1
        if self._serving_failures >= self._failures_to_down:
            self._suspend(now)
        return Change.NONE

    def served(self, request_id: str) -> None:
        """A request ended well there."""
        if self._is_old_news(request_id):
            return
        self._end_trial(request_id)
        self._serving_failures = 0
        self._suspension_s = 0.0
        self._suspended_until = None

    def released(self, request_id: str) -> None:
        """A request ended without telling anything about the worker (its client left)."""
        self._end_trial(request_id)

    def _suspend(self, now: float) -> None:
        self._suspension_s = min(max(_FIRST_SUSPENSION_S, self._suspension_s * 2), _LONGEST_SUSPENSION_S)
        self._suspended_until = now + self._suspension_s

    def _is_old_news(self, request_id: str) -> bool:
        """Sent before the suspension: a burst that broke together is one relapse, not one for each of its requests."""
        return self._suspended_until is not None and self._trial != request_id

    def _end_trial(self, request_id: str) -> None:
        if self._trial == request_id:
            self._trial = None

    def _set_up(self, up: bool) -> Change:
        if self.up == up:
            return Change.NONE
        self.up = up
        return Change.WENT_UP if up else Change.WENT_DOWN
