"""May a worker be sent to? Two opinions, kept apart: what probes say, and what real requests went through.

A refused connection is proof enough to stop sending at once. Failures in serving count up to a threshold and then
suspend the worker for a time that doubles with every relapse, whatever its probes say: a worker that answers probes
and fails all requests must not flap, and neither must one whose engine is stuck. Client errors and back-pressure say
nothing about health.

After a suspension requests are let through as trials. As long as a trial has shown nothing there is no second one for
half a minute, and a trial that ends without having shown anything (its client left) costs another wait, so a stuck
worker gets one request per suspension at most. A trial that reaches its first token lets the next one in; one that ends
well ends the matter.

A client that leaves after a long wait for a worker that has given no sign of life since is a failure too: clients may
have less patience than `first_byte_s`, and then a stuck engine would never be found out.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

from kvrelay.core.model.units import Fault

SILENCE_S = 10.0
_FIRST_SUSPENSION_S, _LONGEST_SUSPENSION_S = 1.0, 30.0
_UNREACHABLE = frozenset({Fault.CONNECT, Fault.CONNECT_TIMEOUT, Fault.TLS})
_SAYS_NOTHING = frozenset({Fault.BACK_PRESSURE, Fault.TOTAL_TIMEOUT, Fault.NOT_CONTINUED})


class Change(Enum):
    """Whether a worker's standing changed."""

    NONE = auto()
    WENT_UP = auto()
    WENT_DOWN = auto()
    SUSPENDED = auto()
    RECOVERED = auto()


class Standing(StrEnum):
    """How much speaks against sending a request there; the best first."""

    ROUTABLE = "routable"
    SUSPENDED = "suspended"  # up according to its probes, but requests failed there lately
    UNREACHED = "unreached"  # it refused a connection, and not enough probes have confirmed yet that it is gone
    DEAD = "dead"  # its probes fail


class Health:
    """Standing of one incarnation. A worker that has just described itself is up."""

    def __init__(self, *, failures_to_down: int, successes_to_up: int) -> None:
        self._failures_to_down = failures_to_down
        self._successes_to_up = successes_to_up
        self.up = True
        self.relapses = 0  # suspensions in a row, without a request that ended well in between
        self._probe_failures = 0
        self._probe_successes = 0
        self._serving_failures = 0
        self._suspended_until: float | None = None
        self._sent: dict[str, None] = {}  # requests sent since the suspension: only they are news
        self._trial: str | None = None  # the one of them that has shown nothing yet
        self._trial_until = 0.0
        self._sign_of_life_at = 0.0

    def change(self, *, failures_to_down: int, successes_to_up: int) -> None:
        """New thresholds, for what is counted from now on and for what was counted already."""
        self._failures_to_down = failures_to_down
        self._successes_to_up = successes_to_up

    def routable(self, now: float) -> bool:
        """May a new request be sent now? While suspended no; afterwards one trial at a time."""
        return self.standing(now) is Standing.ROUTABLE

    def standing(self, now: float) -> Standing:
        if not self.up:
            return Standing.DEAD if self.dead else Standing.UNREACHED
        if self._suspended_until is None:
            return Standing.ROUTABLE
        on_trial = self._trial is not None and now < self._trial_until
        return Standing.SUSPENDED if on_trial or now < self._suspended_until else Standing.ROUTABLE

    @property
    def dead(self) -> bool:
        """Its probes fail."""
        return not self.up and self._probe_failures >= self._failures_to_down

    @property
    def steady(self) -> bool:
        """Not suspended, or down: `standing` will not change by time alone."""
        return self._suspended_until is None or not self.up

    @property
    def suspended(self) -> bool:
        return self._suspended_until is not None

    def dispatched(self, now: float, request_id: str) -> None:
        """A request goes there; after a suspension it is a trial."""
        if self._suspended_until is None:
            return
        self._sent[request_id] = None
        if self._trial is None or now >= self._trial_until:
            self._trial, self._trial_until = request_id, now + _LONGEST_SUSPENSION_S

    def showed_life(self, now: float, request_id: str | None = None) -> None:
        """It computes: a first token of this request, or a KV event."""
        self._sign_of_life_at = now
        if request_id is not None and self._trial == request_id:
            self._trial = None

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

    def had_given_up(self, request_id: str) -> bool:
        """Whether the worker went down, or was suspended, while this request was under way."""
        return not self.up or not self._is_news(request_id)

    def failed(self, now: float, request_id: str, fault: Fault) -> Change:
        """A request failed there."""
        if fault in _SAYS_NOTHING:
            self._release(now, request_id)
            return Change.NONE
        news = self._is_news(request_id)
        self._forget(request_id)
        if fault in _UNREACHABLE:
            self._probe_successes = 0
            if self.up:
                self._probe_failures = 0
            return self._set_up(False)
        return self._count_failure(now) if news else Change.NONE

    def served(self, now: float, request_id: str) -> Change:
        """A request ended well there."""
        self._sign_of_life_at = now
        if not self._is_news(request_id):
            return Change.NONE
        was_suspended = self.suspended
        self._serving_failures = self.relapses = 0
        self._suspended_until = self._trial = None
        self._sent.clear()
        return Change.RECOVERED if was_suspended else Change.NONE

    def abandoned(self, now: float, request_id: str, *, sent_at: float) -> Change:
        """Its client left, or its time was over, before it ended. That tells something only after long silence."""
        news = self._is_news(request_id)
        self._release(now, request_id)
        silent = now - sent_at >= SILENCE_S and self._sign_of_life_at <= sent_at
        return self._count_failure(now) if news and silent else Change.NONE

    def _count_failure(self, now: float) -> Change:
        self._serving_failures += 1
        if self._serving_failures < self._failures_to_down:
            return Change.NONE
        first = not self.suspended
        self.relapses += 1
        self._wait(now)
        self._sent.clear()
        self._trial = None
        return Change.SUSPENDED if first else Change.NONE

    def _wait(self, now: float) -> None:
        wait_s = min(_FIRST_SUSPENSION_S * 2.0 ** min(self.relapses - 1, 16), _LONGEST_SUSPENSION_S)
        self._suspended_until = now + wait_s

    def _release(self, now: float, request_id: str) -> None:
        """It ended without having told anything. If it was the trial, the next one has to wait as long again."""
        if self._trial == request_id:
            self._wait(now)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._sent.pop(request_id, None)
        if self._trial == request_id:
            self._trial = None

    def _is_news(self, request_id: str) -> bool:
        """Not if it was sent before the suspension: a burst that broke together is one relapse, not one for each of
        its requests."""
        return self._suspended_until is None or request_id in self._sent

    def _set_up(self, up: bool) -> Change:
        if self.up == up:
            return Change.NONE
        self.up = up
        return Change.WENT_UP if up else Change.WENT_DOWN
