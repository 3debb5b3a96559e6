"""Virtual time: what is due, in order of time and, at one instant, in the order in which it was put down."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """A heap of actions. Time never goes back; what is put down for the past happens now."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._put_down = 0

    def __len__(self) -> int:
        return len(self._due)

    def at(self, when_s: float, action: Action) -> None:
        heapq.heappush(self._due, (when_s if when_s > self.now_s else self.now_s, self._put_down, action))
        self._put_down += 1

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def next_s(self) -> float | None:
        """When the next action is due; None if nothing is."""
        return self._due[0][0] if self._due else None

    def jump(self, seconds: float) -> None:
        """The clock goes ahead while nothing happens; what was due meanwhile happens now."""
        self.now_s += seconds

    def step(self) -> None:
        """Do what is due next. Its time becomes the present."""
        due_s, _, action = heapq.heappop(self._due)
        self.now_s = max(self.now_s, due_s)
        action()
