"""Sends a plan on schedule: a turn goes out when it is due, whatever became of other sessions' requests.

Within a session it never goes out before the previous turn ended and its think time passed, because its context
contains that turn's answer; then *that* moment is when it was due. A turn that failed does not stop its session: the
agent in the trace went on, too, and leaving its later turns out would flatter the policy that failed.

A cap on requests in flight makes the load follow the fleet's speed. That is sometimes wanted and never an open loop:
what it held back is in the samples, and `sending.py` says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from msgspec import Struct

from kvrelay.core.traces.plan import Plan, PlannedSession, PlannedTurn
from kvrelay.lab.replay.client import CompletionClient
from kvrelay.lab.replay.request_body import request_body
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.stream import Outcome

WRITE_AHEAD_S = 1.0  # a body is written this long before it is due, so that writing it makes nothing late


class Arm(Struct, frozen=True):
    """One policy under test, once."""

    policy: str
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.repeat}"


async def replay(
    plan: Plan,
    client: CompletionClient,
    *,
    arm: Arm,
    model: str,
    on_sample: Callable[[Sample], None],
    cache_salt: str | None = None,
    max_in_flight: int | None = None,
    phase: str = "",
) -> None:
    """Returns when every turn was answered or failed; `on_sample` is called for each as it ends.

    A salt of its own lets an arm start with empty caches on workers that others have used.
    """
    places = None if max_in_flight is None else asyncio.Semaphore(max_in_flight)

    def write(turn: PlannedTurn) -> bytes:
        return request_body(model, turn.token_ids, turn.max_tokens, form=client.form, cache_salt=cache_salt)

    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for session in plan.sessions:
            sender = _SessionSender(client, arm, start_s, on_sample, write, places, phase)
            group.create_task(sender.run(session))


class _Moments(Struct, frozen=True):
    """Of one request before it left, on the client's clock."""

    planned_s: float
    due_s: float
    released_s: float


class _SessionSender:
    """Sends one session's turns in order."""

    def __init__(
        self,
        client: CompletionClient,
        arm: Arm,
        start_s: float,
        on_sample: Callable[[Sample], None],
        write: Callable[[PlannedTurn], bytes],
        places: asyncio.Semaphore | None,
        phase: str,
    ) -> None:
        self._client = client
        self._arm = arm
        self._start_s = start_s
        self._on_sample = on_sample
        self._write = write
        self._places = places
        self._phase = phase

    async def run(self, session: PlannedSession) -> None:
        may_start_s, next_body = self._start_s, None
        for index, turn in enumerate(session.turns):
            planned_s = self._start_s + turn.due_ms / 1000
            due_s = max(planned_s, may_start_s + (turn.think_ms / 1000 if index else 0.0))
            await _sleep_until(due_s - WRITE_AHEAD_S)
            body = next_body or self._write(turn)
            # The turn after it may be due the moment this one ends: its body is written now, too.
            next_body = self._write(session.turns[index + 1]) if index + 1 < len(session.turns) else None
            await _sleep_until(due_s)
            request_id = f"{self._arm.name}:{session.session_id}:{index}"
            if self._phase:
                request_id = f"{self._phase}:{request_id}"
            outcome, released_s = await self._send(body, request_id, session.session_id, due_s)
            may_start_s = outcome.ended_s
            moments = _Moments(planned_s, due_s, released_s)
            self._on_sample(self._sample(request_id, session.session_id, index, moments, outcome))

    async def _send(self, body: bytes, request_id: str, session_id: str, due_s: float) -> tuple[Outcome, float]:
        """The outcome, and when the cap let it go (when it was due, if it did not have to wait)."""
        async with AsyncExitStack() as stack:
            released_s = due_s
            if self._places is not None:
                has_to_wait = self._places.locked()
                await stack.enter_async_context(self._places)
                released_s = time.monotonic() if has_to_wait else due_s
            return await self._client.complete(body, request_id=request_id, session_id=session_id), released_s

    def _sample(self, request_id: str, session_id: str, turn: int, moments: _Moments, outcome: Outcome) -> Sample:
        first_s, usage = outcome.first_token_s, outcome.usage
        details = usage.prompt_tokens_details if usage else None
        return Sample(
            arm=self._arm.name,
            policy=self._arm.policy,
            repeat=self._arm.repeat,
            request_id=outcome.receipt_id or request_id,
            session_id=session_id,
            turn=turn,
            planned_ms=self._since_start_ms(moments.planned_s),
            due_ms=self._since_start_ms(moments.due_s),
            held_ms=_ms(max(0.0, moments.released_s - moments.due_s)),
            sent_ms=self._since_start_ms(outcome.sent_s),
            written_ms=None if outcome.written_s is None else self._since_start_ms(outcome.written_s),
            first_token_ms=None if first_s is None else self._since_start_ms(first_s),
            ended_ms=self._since_start_ms(outcome.ended_s),
            ttft_ms=None if first_s is None else _ms(first_s - moments.due_s),
            ttft_sent_ms=None if first_s is None else _ms(first_s - outcome.sent_s),
            itl_ms=tuple(_ms(b - a) for a, b in zip(outcome.token_times_s, outcome.token_times_s[1:], strict=False)),
            http_status=outcome.http_status,
            worker=outcome.worker,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            cached_tokens=details.cached_tokens if details else None,
            finish_reason=outcome.finish_reason,
            answer_digest=_digest(outcome.text) if outcome.failure is None else None,
            phase=self._phase,
            failure=outcome.failure,
        )

    def _since_start_ms(self, at_s: float) -> float:
        return _ms(at_s - self._start_s)


async def _sleep_until(at_s: float) -> None:
    wait_s = at_s - time.monotonic()
    if wait_s > 0:
        await asyncio.sleep(wait_s)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
