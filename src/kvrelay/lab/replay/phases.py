"""Replays a preset in its blocks: before each, what the block asks for is done to the workers' caches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from kvrelay.core.traces.plan import Plan, PlannedSession
from kvrelay.core.traces.presets import Phase
from kvrelay.lab.replay.client import CompletionClient
from kvrelay.lab.replay.replay import Arm, replay
from kvrelay.lab.replay.sample import Sample

Prepare = Callable[[Phase], Awaitable[CompletionClient]]
"""Empties caches or restarts workers as `phase.before` says. After a restart there may be new addresses, so it answers
with the client to go on with."""


def plan_of_phase(plan: Plan, phase: Phase) -> Plan:
    """The sessions of one block, with times that count from its beginning."""
    sessions = [session for session in plan.sessions if phase.holds(session.session_id)]
    start_ms = min((session.turns[0].due_ms for session in sessions), default=0.0)
    return replace(plan, sessions=tuple(_earlier(session, start_ms) for session in sessions))


async def replay_in_phases(
    plan: Plan,
    phases: tuple[Phase, ...],
    *,
    prepare: Prepare,
    arm: Arm,
    model: str,
    on_sample: Callable[[Sample], None],
    max_in_flight: int | None = None,
) -> None:
    """One block after the other; samples carry the block's name. Times of a block count from its own beginning."""
    homeless = [s.session_id for s in plan.sessions if not any(phase.holds(s.session_id) for phase in phases)]
    assert not homeless, homeless
    for phase in phases:
        client = await prepare(phase)
        await replay(
            plan_of_phase(plan, phase),
            client,
            arm=arm,
            model=model,
            on_sample=on_sample,
            max_in_flight=max_in_flight,
            phase=phase.name,
        )


def _earlier(session: PlannedSession, by_ms: float) -> PlannedSession:
    turns = tuple(replace(turn, due_ms=round(turn.due_ms - by_ms, 3)) for turn in session.turns)
    return PlannedSession(session.session_id, turns)
