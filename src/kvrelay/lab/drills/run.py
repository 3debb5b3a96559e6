"""Runs a drill on a fleet: its steps in order, then its promises over what was written down."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from kvrelay.lab.drills.drill import Do, Drill, Look, Send, Settle, Wait
from kvrelay.lab.drills.fleets.base import CannotDo, Fleet
from kvrelay.lab.drills.history import Finding, History, Verdict
from kvrelay.lab.drills.promises import GENERAL


class Judged(Struct, frozen=True):
    """One promise with what was found."""

    promise: str
    verdict: Verdict
    observed: str


class DrillResult(Struct, frozen=True, kw_only=True):
    """A drill on a fleet: fail if any promise was broken, else unknown if any could not be looked at."""

    drill: str
    fleet: str
    verdict: Verdict
    promises: tuple[Judged, ...]
    history: History
    cannot: str | None = None  # why the drill could not be carried out here


async def run_drill(drill: Drill, fleet: Callable[[Drill], Fleet]) -> DrillResult:
    """`fleet` makes a fresh fleet for the drill. What cannot be done there makes all of it unknown."""
    running = fleet(drill)
    try:
        async with running:
            await _carry_out(drill, running)
    except CannotDo as reason:
        return DrillResult(
            drill=drill.name,
            fleet=running.kind,
            verdict="unknown",
            promises=(),
            history=running.history,
            cannot=str(reason),
        )
    return judge(drill, running.kind, running.history)


def judge(drill: Drill, fleet: str, history: History) -> DrillResult:
    """Sees the history and nothing else."""
    judged = []
    for promise in (*GENERAL, *drill.promises):
        finding = promise.judge(history)
        judged.append(Judged(promise.says, finding.verdict, finding.observed))
    return DrillResult(
        drill=drill.name, fleet=fleet, verdict=verdict_of(judged), promises=tuple(judged), history=history
    )


def verdict_of(judged: list[Judged]) -> Verdict:
    verdicts = {each.verdict for each in judged}
    return "fail" if "fail" in verdicts else "unknown" if "unknown" in verdicts or not judged else "pass"


async def _carry_out(drill: Drill, fleet: Fleet) -> None:
    sent = 0
    for step in drill.steps:
        match step:
            case Send():
                await fleet.send(sent, step)
                sent += 1
            case Do(action):
                await fleet.do(action)
            case Wait(seconds):
                await fleet.wait(seconds)
            case Settle():
                await fleet.settle(step)
            case Look():
                await fleet.look(step)


__all__ = ["DrillResult", "Finding", "Judged", "judge", "run_drill", "verdict_of"]
