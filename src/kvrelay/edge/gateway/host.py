"""Drives the router: events in, effects out, effects into I/O. It decides nothing.

An effect can cause the next event while it is being performed (a kept connection accepts a request at once). Such
events wait until the effects at hand are done, so the router never sees one step inside another.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kvrelay.core.model.effects import (
    BreakOff,
    CancelAttempt,
    Dispatch,
    Effect,
    Hasten,
    PassThrough,
    Refuse,
    Report,
    RequestReplay,
    RequestSnapshot,
    ShareSession,
    WakeAt,
    WriteReceipt,
)
from kvrelay.core.model.events import Event, RequestArrived, WokeUp
from kvrelay.core.routing.router import Router
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.observe.receipt_log import ReceiptLog
from kvrelay.edge.observe.tracing.tracing import Tracing

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.25
_LOUD = frozenset({"index_unusable", "tail_drift"})  # reports that somebody should look into


class HostedRequest(Protocol):
    """A live client request, as the router's effects address it."""

    deadline_s: float
    decision_us: float | None

    def dispatch(self, effect: Dispatch) -> None: ...
    def refuse(self, effect: Refuse) -> None: ...
    def pass_through(self) -> None: ...
    def break_off(self, effect: BreakOff) -> None: ...
    def cancel(self) -> None: ...
    def hasten(self, attempt: int) -> None: ...
    def expire(self) -> None: ...
    def cut(self, reason: str) -> None: ...


class RouterHost:
    """One router, one event loop. `requests` holds whoever awaits effects, oldest first."""

    def __init__(
        self,
        router: Router,
        *,
        clock: Callable[[], float],
        metrics: Metrics,
        receipts: ReceiptLog,
        replay: Callable[[RequestReplay], None],
        snapshot: Callable[[RequestSnapshot], None],
        share: Callable[[ShareSession], None] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.router = router
        self.requests: dict[str, HostedRequest] = {}
        self.clock = clock
        self._metrics = metrics
        self._receipts = receipts
        self._tracing = tracing
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Event] = deque()
        self._stepping = False
        self._wakes: dict[int, asyncio.TimerHandle] = {}
        self._wake_numbers = itertools.count()
        self._sweeper = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)
        self._actions: dict[type[Any], Callable[[Any], None]] = {
            Dispatch: self._dispatch,
            Refuse: self._refuse,
            PassThrough: self._pass_through,
            BreakOff: self._break_off,
            CancelAttempt: self._cancel,
            Hasten: self._hasten,
            RequestReplay: replay,
            RequestSnapshot: snapshot,
            WakeAt: self._wake_at,
            WriteReceipt: self._write_receipt,
            Report: self._report,
        }
        if share is not None:  # else the router has no siblings and asks for no such thing
            self._actions[ShareSession] = share

    def feed(self, event: Event) -> None:
        """One event into the router, its effects into the world. In the event loop only."""
        if self._stepping:
            self._pending.append(event)
            return
        self._stepping = True
        try:
            while True:
                if type(event) is RequestArrived:
                    effects = self._decide(event)
                else:
                    effects = self.router.step(self.clock(), event)
                for effect in effects:
                    self._actions[type(effect)](effect)
                if not self._pending:
                    break
                event = self._pending.popleft()
        finally:
            self._stepping = False

    def cut(self, reason: str) -> int:
        """End every open request now; answers how many. Their receipts say why."""
        requests = tuple(self.requests.values())
        for request in requests:
            request.cut(reason)
        return len(requests)

    def close(self) -> None:
        """No timers after this."""
        self._sweeper.cancel()
        for wake in self._wakes.values():
            wake.cancel()
        self._wakes.clear()

    def _decide(self, arrived: RequestArrived) -> tuple[Effect, ...]:
        """The step that routes is timed: the figure belongs into the receipt."""
        now_s = self.clock()
        began = time.perf_counter_ns()
        effects = self.router.step(now_s, arrived)
        self.requests[arrived.request_id].decision_us = (time.perf_counter_ns() - began) / 1000
        return effects

    # --- effects -----------------------------------------------------------------------------------------------------

    def _dispatch(self, effect: Dispatch) -> None:
        self.requests[effect.request_id].dispatch(effect)

    def _refuse(self, effect: Refuse) -> None:
        self.requests[effect.request_id].refuse(effect)

    def _pass_through(self, effect: PassThrough) -> None:
        self.requests[effect.request_id].pass_through()

    def _break_off(self, effect: BreakOff) -> None:
        self.requests[effect.request_id].break_off(effect)

    def _cancel(self, effect: CancelAttempt) -> None:
        self.requests[effect.request_id].cancel()

    def _hasten(self, effect: Hasten) -> None:
        self.requests[effect.request_id].hasten(effect.attempt)

    def _wake_at(self, effect: WakeAt) -> None:
        number = next(self._wake_numbers)
        self._wakes[number] = self._loop.call_later(max(0.0, effect.at - self.clock()), self._ring, number)

    def _ring(self, number: int) -> None:
        del self._wakes[number]
        self.feed(WokeUp())

    def _write_receipt(self, effect: WriteReceipt) -> None:
        """The last effect of every request: from here on nothing addresses it."""
        self.requests.pop(effect.receipt.request_id, None)
        self._receipts.write(effect.receipt)
        self._metrics.observe_receipt(effect.receipt)
        if self._tracing is not None:
            self._tracing.finish(effect.receipt)

    def _report(self, effect: Report) -> None:
        self._metrics.count_report(effect)
        level = logging.WARNING if effect.kind in _LOUD else logging.INFO
        log.log(level, "%s worker=%s count=%d %s", effect.kind, effect.worker or "-", effect.count, effect.detail)

    # --- deadlines ---------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Not only the oldest: the total time may have been changed since they came."""
        now_s = self.clock()
        for request in [each for each in self.requests.values() if each.deadline_s <= now_s]:
            request.expire()
        self._sweeper = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)
