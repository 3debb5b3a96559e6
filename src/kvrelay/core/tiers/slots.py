"""Bounded concurrency of one tier: what may run runs, the rest waits in order.

After an outage the bound begins at one and doubles with every success, up to its setting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Work = TypeVar("Work")


class Slots(Generic[Work]):
    def __init__(self, limit: int) -> None:
        self._limit = self._allowed = limit
        self.running = 0
        self.waiting: deque[Work] = deque()

    def submit(self, work: Work) -> tuple[Work, ...]:
        """What may start now: the work given, or nothing."""
        self.waiting.append(work)
        return self._start()

    def done(self, *, answered: bool) -> tuple[Work, ...]:
        """One piece of running work is over; what may start instead."""
        assert self.running > 0, "work ended that had not started"
        self.running -= 1
        if answered:
            self._allowed = min(self._limit, self._allowed * 2)
        return self._start()

    def begin_gently(self) -> None:
        self._allowed = 1

    def withdraw(self, unwanted: Callable[[Work], bool]) -> list[Work]:
        """Take back what has not started; returns it."""
        gone = [work for work in self.waiting if unwanted(work)]
        self.waiting = deque(work for work in self.waiting if not unwanted(work))
        return gone

    def _start(self) -> tuple[Work, ...]:
        started = []
        while self.waiting and self.running < self._allowed:
            started.append(self.waiting.popleft())
            self.running += 1
        return tuple(started)
