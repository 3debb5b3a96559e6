"""Whole tasks on the metrics page: how many ended how, and how long they took."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.metrics_core import Metric

from kvrelay.core.receipts.tasks import Task, TaskLedger, TaskOutcome
from kvrelay.edge.observe.gauges import counter
from kvrelay.edge.observe.instruments import SESSION_S, Counter, Histogram

MAX_OPEN_TASKS = 100_000

_decode_parts = msgspec.json.Decoder(list[tuple[str, Task]]).decode


class TaskCounts:
    """What of a ledger is over."""

    def __init__(self, ledger: TaskLedger) -> None:
        self.ledger = ledger
        self._ended = Counter("kvrelay_tasks_total")
        self._wall = Histogram("kvrelay_session_wall_seconds", SESSION_S)
        for outcome in TaskOutcome:
            self._ended.add((outcome.value,), 0)

    def take(self, parts: bytes) -> None:
        """Sessions as another process has seen them: its `TaskLedger.take_all` as JSON."""
        for tenant, part in _decode_parts(parts):
            self.ledger.add(tenant, part)

    def families(self, now_ms: float) -> Iterator[Metric]:
        """`now_ms` is of the clock that the receipts were written by."""
        for task in self.ledger.settle(now_ms):
            self._ended.add((task.outcome.value,))
            self._wall.observe(task.wall_ms / 1e3, task.session)
        yield self._ended.family()
        yield self._wall.family()
        yield counter("kvrelay_tasks_not_followed_total", [((), self.ledger.not_followed)])
