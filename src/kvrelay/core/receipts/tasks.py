"""Whole tasks: a session is one, and it has succeeded only if every request of it did.

Nobody announces the end of a session, so it is over when nothing of it has ended for `idle_s`. Requests without a
session belong to no task.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from kvrelay.core.model.units import Status
from kvrelay.core.receipts.receipt import Receipt


class TaskOutcome(StrEnum):
    """FAILED weighs more than CANCELLED: one failed request spoils the task, whatever its client did later."""

    OK = "ok"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Task(Struct):
    """An open or ended session. Times are of the host's monotonic clock, in milliseconds."""

    session: str
    began_ms: float
    ended_ms: float
    requests: int
    outcome: TaskOutcome

    @property
    def wall_ms(self) -> float:
        return self.ended_ms - self.began_ms


_OUTCOMES = {Status.OK: TaskOutcome.OK, Status.CLIENT_CANCELLED: TaskOutcome.CANCELLED}
_BEST_FIRST = tuple(TaskOutcome)


def _worse(one: TaskOutcome, other: TaskOutcome) -> TaskOutcome:
    return max(one, other, key=_BEST_FIRST.index)


class TaskLedger:
    """Follows at most `max_open` sessions; what came beyond that is counted in `not_followed`, not guessed."""

    def __init__(self, *, idle_s: float, max_open: int) -> None:
        self.idle_s = idle_s
        self.not_followed = 0
        self._max_open = max_open
        self._open: dict[tuple[str, str], Task] = {}  # the one with the latest end is last

    def __len__(self) -> int:
        return len(self._open)

    def observe(self, receipt: Receipt) -> None:
        """On the request path: a session that is open already costs two look-ups."""
        session, began_ms = receipt.session_id, receipt.arrived_ms
        if session is None or began_ms is None:
            return
        outcome = _OUTCOMES.get(receipt.status, TaskOutcome.FAILED)
        ended_ms = began_ms + (receipt.e2e_ms or 0.0)
        key = receipt.tenant, session
        task = self._open.pop(key, None)
        if task is None:
            self.add(receipt.tenant, Task(session, began_ms, ended_ms, 1, outcome))
            return
        if began_ms < task.began_ms:
            task.began_ms = began_ms
        if ended_ms > task.ended_ms:
            task.ended_ms = ended_ms
        task.requests += 1
        if outcome is not task.outcome:
            task.outcome = _worse(outcome, task.outcome)
        self._open[key] = task

    def add(self, tenant: str, part: Task) -> None:
        """A part of a session, perhaps all of it."""
        key = tenant, part.session
        task = self._open.pop(key, None)
        if task is None:
            if len(self._open) >= self._max_open:
                self.not_followed += 1
                return
            self._open[key] = part
            return
        task.began_ms = min(task.began_ms, part.began_ms)
        task.ended_ms = max(task.ended_ms, part.ended_ms)
        task.requests += part.requests
        task.outcome = _worse(part.outcome, task.outcome)
        self._open[key] = task

    def settle(self, now_ms: float) -> list[Task]:
        """Those that are over, which are forgotten here."""
        over = []
        limit_ms = now_ms - self.idle_s * 1e3
        for key, task in self._open.items():
            if task.ended_ms > limit_ms:
                break
            over.append(key)
        return [self._open.pop(key) for key in over]

    def take_all(self) -> list[tuple[str, Task]]:
        """Everything that is open, with its tenant, to be followed by somebody else."""
        taken = [(tenant, task) for (tenant, _), task in self._open.items()]
        self._open.clear()
        return taken
