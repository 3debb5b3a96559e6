"""Takes a tier out of use when it does not answer, and asks again by itself.

No request ever pays for finding out whether a tier is back: while it is out of use, a ping of its own goes out from
time to time. The waits are drawn, so that a fleet does not return all at once.
"""

from __future__ import annotations


class Breaker:
    """In use until `failures_to_open` failures in a row; then out of use until a ping succeeds."""

    def __init__(self, *, failures_to_open: int, probe_interval_s: float) -> None:
        self._failures_to_open = failures_to_open
        self._probe_interval_s = probe_interval_s
        self._failures = 0
        self.ping_at_s: float | None = None
        self.out_of_use = False
        self.pinging = False
        self.times_opened = 0

    def succeeded(self) -> None:
        """An answer to ordinary work. One that was asked before the tier went out of use does not bring it back."""
        if not self.out_of_use:
            self._failures = 0

    def failed(self, now_s: float, draw: float) -> bool:
        """No answer; `draw` is uniform in 0..1. True if that takes the tier out of use."""
        self._failures += 1
        if self.out_of_use or self._failures < self._failures_to_open:
            return False
        self.out_of_use = True
        self.times_opened += 1
        self._wait(now_s, draw)
        return True

    def should_ping(self, now_s: float) -> bool:
        """True once per wait; a ping is then under way until `pinged`."""
        if not self.out_of_use or self.pinging or self.ping_at_s is None or now_s < self.ping_at_s:
            return False
        self.pinging = True
        self.ping_at_s = None
        return True

    def pinged(self, now_s: float, draw: float, *, answered: bool) -> bool:
        """True if the tier is in use again."""
        self.pinging = False
        if not answered:
            self._wait(now_s, draw)
            return False
        returned, self.out_of_use, self._failures = self.out_of_use, False, 0
        self.ping_at_s = None
        return returned

    def _wait(self, now_s: float, draw: float) -> None:
        self.ping_at_s = now_s + self._probe_interval_s * (0.5 + 0.5 * draw)
