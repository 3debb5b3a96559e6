"""Sends a plan on schedule: a turn goes out when it is due, whatever became of other sessions' requests.

Within a session it never goes out before the previous turn ended and its think time passed, because its context
contains that turn's answer; then *that* moment is when it was due. A turn that failed does not stop its session: the
agent in the trace went on, too, and leaving its later turns out would flatter the policy that failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from msgspec import Struct

from kvrelay.core.traces.plan import Plan, PlannedSession
from kvrelay.lab.replay.client import CompletionClient, Outcome, completion_body
from kvrelay.lab.replay.sample import Sample

Send = Callable[..., Awaitable[Outcome]]


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
) -> None:
    """Returns when every turn was answered or failed; `on_sample` is called for each as it ends.

    A salt of its own lets an arm start with empty caches on workers that others have used.
    """
    bodies = {
        session.session_id: [
            completion_body(model, turn.token_ids, turn.max_tokens, cache_salt=cache_salt) for turn in session.turns
        ]
        for session in plan.sessions
    }
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for session in plan.sessions:
            sender = _SessionSender(client, arm, start_s, on_sample)
            group.create_task(sender.run(session, bodies[session.session_id]))


class _SessionSender:
    """Sends one session's turns in order."""

    def __init__(self, client: CompletionClient, arm: Arm, start_s: float, on_sample: Callable[[Sample], None]) -> None:
        self._client = client
        self._arm = arm
        self._start_s = start_s
        self._on_sample = on_sample

    async def run(self, session: PlannedSession, bodies: list[bytes]) -> None:
        may_start_s = self._start_s
        for index, (turn, body) in enumerate(zip(session.turns, bodies, strict=True)):
            due_s = max(self._start_s + turn.due_ms / 1000, may_start_s + (turn.think_ms / 1000 if index else 0.0))
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            request_id = f"{self._arm.name}:{session.session_id}:{index}"
            outcome = await self._client.complete(body, request_id=request_id, session_id=session.session_id)
            may_start_s = outcome.ended_s
            self._on_sample(self._sample(request_id, session.session_id, index, due_s, outcome))

    def _sample(self, request_id: str, session_id: str, turn: int, due_s: float, outcome: Outcome) -> Sample:
        first_s, usage = outcome.first_token_s, outcome.usage
        details = usage.prompt_tokens_details if usage else None
        return Sample(
            arm=self._arm.name,
            policy=self._arm.policy,
            repeat=self._arm.repeat,
            request_id=outcome.receipt_id or request_id,
            session_id=session_id,
            turn=turn,
            due_ms=self._since_start_ms(due_s),
            sent_ms=self._since_start_ms(outcome.sent_s),
            ended_ms=self._since_start_ms(outcome.ended_s),
            ttft_ms=None if first_s is None else _ms(first_s - due_s),
            ttft_sent_ms=None if first_s is None else _ms(first_s - outcome.sent_s),
            itl_ms=tuple(_ms(b - a) for a, b in zip(outcome.token_times_s, outcome.token_times_s[1:], strict=False)),
            http_status=outcome.http_status,
            worker=outcome.worker,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            cached_tokens=details.cached_tokens if details else None,
            failure=outcome.failure,
        )

    def _since_start_ms(self, at_s: float) -> float:
        return _ms(at_s - self._start_s)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
