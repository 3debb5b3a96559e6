"""Drives the mock engine with the real clock: effects become timers, messages and calls to whoever waits for tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, assert_never

from kvrelay.core.engine.engine import (
    Aborted,
    Admitted,
    BlocksLoaded,
    CacheResetAnswered,
    CacheResetAsked,
    CorruptionDone,
    Engine,
    EngineEffect,
    EngineEvent,
    Finished,
    PayloadsCorrupted,
    Preempted,
    PublishBatch,
    StepEnded,
    StepStarted,
    Submitted,
    TokenMade,
)
from kvrelay.core.engine.sequence import EngineRequest

# A timer that fires a little late must not stretch the stated rates, so the engine is told the time that was due; a
# process that was held up longer than this is told the truth, because a real engine does not catch up either.
TIMER_SLACK_S = 0.005

IDLE_CHECK_S = 5.0  # after this long without work the engine's invariants are checked, which nobody then waits for


class TokenListener(Protocol):
    """Who waits for the tokens of one engine request."""

    def on_token(self, request_id: str, token_id: int) -> None: ...
    def on_finished(self, finished: Finished) -> None: ...


class EngineObserver(Protocol):
    """Who counts."""

    def on_step(self, started: StepStarted) -> None: ...
    def on_admitted(self, admitted: Admitted) -> None: ...
    def on_preempted(self) -> None: ...
    def on_token(self, request_id: str, now_s: float) -> None: ...
    def on_finished(self, finished: Finished, now_s: float) -> None: ...


class EngineHost:
    """One engine on one event loop, with one timer: the end of the step under way."""

    def __init__(self, engine: Engine, *, publish: Callable[[PublishBatch], None], observer: EngineObserver) -> None:
        self.engine = engine
        self._publish = publish
        self._observer = observer
        self._listeners: dict[str, TokenListener] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_check: asyncio.TimerHandle | None = None

    def submit(self, request: EngineRequest, listener: TokenListener) -> None:
        self._listeners[request.request_id] = listener
        self._cancel_idle_check()
        self._step(time.monotonic(), Submitted(request))

    def abort(self, request_id: str) -> None:
        """The listener hears no more of this request."""
        self._listeners.pop(request_id, None)
        self._step(time.monotonic(), Aborted(request_id))

    def blocks_loaded(self, loaded: BlocksLoaded) -> None:
        """They are findable from now on."""
        self.engine.step(time.monotonic(), loaded)

    def reset_cache(self) -> bool:
        (answer,) = self.engine.step(time.monotonic(), CacheResetAsked())
        assert isinstance(answer, CacheResetAnswered)
        return answer.success

    def corrupt_payloads(self, *, name: int | None, every: int) -> int:
        """How many cached blocks are wrong from now on."""
        (done,) = self.engine.step(time.monotonic(), PayloadsCorrupted(name, every))
        assert isinstance(done, CorruptionDone)
        return done.blocks

    def stop(self) -> None:
        self._cancel_idle_check()
        if self._timer is not None:
            self._timer.cancel()

    def _step(self, now_s: float, event: EngineEvent) -> None:
        for effect in self.engine.step(now_s, event):
            self._act(now_s, effect)
        if self.engine.unfinished_requests == 0 and self._idle_check is None:
            self._idle_check = self._loop.call_later(IDLE_CHECK_S, self.engine.check)

    def _cancel_idle_check(self) -> None:
        if self._idle_check is not None:
            self._idle_check.cancel()
            self._idle_check = None

    def _act(self, now_s: float, effect: EngineEffect) -> None:
        match effect:
            case TokenMade():
                self._observer.on_token(effect.request_id, now_s)
                listener = self._listeners.get(effect.request_id)
                if listener is not None:
                    listener.on_token(effect.request_id, effect.token_id)
            case StepStarted():
                self._observer.on_step(effect)
                delay_s = max(0.0, effect.ends_at_s - time.monotonic())
                self._timer = self._loop.call_later(delay_s, self._end_step, effect)
            case PublishBatch():
                self._publish(effect)
            case Admitted():
                self._observer.on_admitted(effect)
            case Finished():
                self._observer.on_finished(effect, now_s)
                listener = self._listeners.pop(effect.request_id, None)
                if listener is not None:
                    listener.on_finished(effect)
            case Preempted():
                self._observer.on_preempted()
            case CacheResetAnswered() | CorruptionDone():
                raise AssertionError(f"{effect} was not asked for here")
            case _:
                assert_never(effect)

    def _end_step(self, started: StepStarted) -> None:
        now_s = time.monotonic()
        if now_s - started.ends_at_s < TIMER_SLACK_S:
            now_s = started.ends_at_s
        self._step(now_s, StepEnded(started.step))
