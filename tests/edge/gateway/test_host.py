"""The host against a router that the test writes: every effect reaches who it is for, and steps never nest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvrelay.core.model.effects import (
    BreakOff,
    CancelAttempt,
    Dispatch,
    Effect,
    PassThrough,
    Refuse,
    Report,
    RequestReplay,
    RequestSnapshot,
    WakeAt,
)
from kvrelay.core.model.events import (
    AttemptAccepted,
    ClientLeft,
    Event,
    RequestArrived,
    SessionClosed,
    WokeUp,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.prompt import Prompt
from kvrelay.core.model.units import RouteReason, Status
from kvrelay.edge.gateway.host import RouterHost
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.observe.receipt_log import ReceiptLog
from kvrelay.edge.system.clock import monotonic_s

WORKER = WorkerId("a", "1")
DISPATCH = Dispatch("r", 1, WORKER, None, 0, RouteReason.ROUND_ROBIN)


class ScriptedRouter:
    """Answers each kind of event with the effects given for it, and notes what it saw and how deep it was."""

    def __init__(self, effects: dict[type[Event], tuple[Effect, ...]]) -> None:
        self._effects = effects
        self.seen: list[type[Event]] = []
        self.open = False

    def step(self, now_s: float, event: Event) -> tuple[Effect, ...]:
        assert not self.open, "a step inside another"
        self.seen.append(type(event))
        return self._effects.get(type(event), ())


class NotedRequest:
    def __init__(self, host: RouterHost) -> None:
        self.deadline_s = float("inf")
        self.calls: list[str] = []
        self._host = host

    def dispatch(self, effect: Dispatch) -> None:
        self._host.feed(AttemptAccepted("r", 1))  # as a kept connection does, at once
        self.calls.append("dispatch")

    def refuse(self, effect: Refuse) -> None:
        self.calls.append("refuse")

    def pass_through(self) -> None:
        self.calls.append("pass_through")

    def break_off(self, effect: BreakOff) -> None:
        self.calls.append("break_off")

    def cancel(self) -> None:
        self.calls.append("cancel")

    def expire(self) -> None:
        self.calls.append("expire")
        self.deadline_s = float("inf")


@contextmanager
def hosting(effects: dict[type[Event], tuple[Effect, ...]]) -> Iterator[tuple[RouterHost, ScriptedRouter, list[Any]]]:
    router = ScriptedRouter(effects)
    replays: list[Any] = []
    host = RouterHost(
        router,  # type: ignore[arg-type]
        clock=monotonic_s,
        metrics=Metrics(),
        receipts=ReceiptLog(),
        replay=replays.append,
        snapshot=replays.append,
    )
    try:
        yield host, router, replays
    finally:
        host.close()


def arrived() -> RequestArrived:
    return RequestArrived("r", Prompt(None, {}, "none"))


async def test_events_that_effects_cause_wait_for_the_effects_at_hand() -> None:
    with hosting({RequestArrived: (DISPATCH, Report("worker_up"))}) as (host, router, _):
        request = host.requests["r"] = NotedRequest(host)
        host.feed(arrived())
        assert request.calls == ["dispatch"]
        assert router.seen == [RequestArrived, AttemptAccepted]


@pytest.mark.parametrize(
    ("effect", "call"),
    [
        (Refuse("r", 503, "no_worker"), "refuse"),
        (PassThrough("r"), "pass_through"),
        (BreakOff("r", Status.WORKER_LOST, "worker_lost"), "break_off"),
        (CancelAttempt("r", 1), "cancel"),
    ],
)
async def test_effects_reach_their_request(effect: Effect, call: str) -> None:
    with hosting({ClientLeft: (effect,)}) as (host, _, _):
        request = host.requests["r"] = NotedRequest(host)
        host.feed(ClientLeft("r"))
        assert request.calls == [call]


async def test_replays_and_wakes() -> None:
    replay, snapshot = RequestReplay(WORKER, 0, 5), RequestSnapshot(WORKER, 0)
    with hosting({SessionClosed: (replay, snapshot, WakeAt(monotonic_s() + 0.03), WakeAt(monotonic_s() - 1))}) as (
        host,
        router,
        replays,
    ):
        host.feed(SessionClosed("s"))
        assert replays == [replay, snapshot]
        await asyncio.sleep(0.01)
        assert router.seen == [SessionClosed, WokeUp]
        await asyncio.sleep(0.05)
        assert router.seen == [SessionClosed, WokeUp, WokeUp]


async def test_a_mistake_in_a_step_does_not_stop_the_next() -> None:
    with hosting({ClientLeft: (CancelAttempt("unknown", 1),)}) as (host, router, _):
        with pytest.raises(KeyError):
            host.feed(ClientLeft("unknown"))
        host.feed(SessionClosed("s"))
        assert router.seen[-1] is SessionClosed


async def test_the_oldest_requests_expire_first() -> None:
    with hosting({}) as (host, _, _):
        requests = [NotedRequest(host) for _ in range(3)]
        for number, request in enumerate(requests):
            host.requests[str(number)] = request
        requests[0].deadline_s = requests[1].deadline_s = monotonic_s()
        requests[2].deadline_s = monotonic_s() + 60
        await asyncio.sleep(0.35)
        assert [request.calls for request in requests[1:]] == [[], []] or requests[1].calls == ["expire"]
        assert requests[0].calls == ["expire"] and requests[2].calls == []
