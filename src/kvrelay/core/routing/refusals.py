"""Workers that just said "not now". They are well, and full: while another can serve, new requests pass them over.

Without this every request that prefers a full worker (it holds the prefix) asks there first and is sent on, until the
budget for retries is used up and clients get refusals although the other workers are free.

A pause is short, because a full worker is free again as soon as one of its requests ends. After it one request is let
through, then others only if that one was not refused at once. A worker that is alone is never passed over.
"""

from __future__ import annotations

_PAUSE_S = 0.5  # of a worker that gives no hint
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # hints are whole seconds, and often much longer than it takes
_TRIAL_S = 0.25  # refusals come at once; longer silence means that it was let in


class Refusals:
    """By name of the worker. Empty as long as nobody refuses."""

    def __init__(self) -> None:
        self._paused_until: dict[str, float] = {}
        self._on_trial: dict[str, bool] = {}

    def refused(self, now: float, name: str, retry_after_s: float | None) -> None:
        """It answered "not now"."""
        pause_s = _PAUSE_S if retry_after_s is None else retry_after_s
        self._paused_until[name] = now + max(_SHORTEST_PAUSE_S, min(pause_s, _LONGEST_PAUSE_S))
        self._on_trial[name] = False

    def dispatched(self, now: float, name: str) -> None:
        """A request goes there. The first one after a pause is the trial, the next one ends the matter."""
        until = self._paused_until.get(name)
        if until is None or now < until:
            return
        if self._on_trial[name]:
            self.forget(name)
        else:
            self._on_trial[name] = True
            self._paused_until[name] = now + _TRIAL_S

    def forget(self, name: str) -> None:
        """It served a request to its end, which makes room for another; or it left."""
        if self._paused_until.pop(name, None) is not None:
            del self._on_trial[name]

    def passed_over(self, now: float) -> tuple[str, ...]:
        """Workers that new requests should leave alone if they can."""
        if not self._paused_until:
            return ()
        return tuple(name for name, until in self._paused_until.items() if now < until)
