"""One alarm clock for many reasons: the host is asked only when the next due time is earlier than what is set."""

from __future__ import annotations


class Alarm:
    """The earliest time for which a wake-up has been asked and not yet arrived."""

    def __init__(self) -> None:
        self._set_for: float | None = None

    def set(self, at: float | None) -> float | None:
        """Answers the time to ask the host for, or None when an alarm that is early enough is set already."""
        if at is None or (self._set_for is not None and self._set_for <= at):
            return None
        self._set_for = at
        return at

    def rang(self, now: float) -> None:
        """A wake-up arrived. One that was set for later stays in force with the host and does no harm."""
        if self._set_for is not None and self._set_for <= now:
            self._set_for = None
