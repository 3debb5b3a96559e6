"""How well the generator kept its schedule: what was due when, what left when, and whether it was an open loop.

An open loop sends on time whatever the fleet does; only then does waiting show up as waiting. If the load waits for
answers (a cap on requests in flight) or the generator cannot keep up, slow fleets get an easier test than fast ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from kvrelay.core.stats.distribution import Distribution, distribution
from kvrelay.lab.replay.sample import Sample

LATE_MS = 50.0
"""A generator whose p99 of skew is above this did not keep its schedule."""


class Sending(Struct, frozen=True):
    """Three latenesses kept apart: all of it, what a cap held back, and what the generator itself lost.

    `socket_ms` is the time between the generator's hand and the socket: connecting, and a busy event loop.
    """

    requests: int
    open_loop: bool
    why_not: str | None
    max_in_flight: int | None
    held_requests: int
    lateness_ms: Distribution
    held_ms: Distribution
    skew_ms: Distribution
    socket_ms: Distribution
    behind_plan_ms: Distribution  # due against the plan: answers that took longer than in the trace


def sending(samples: Sequence[Sample], *, max_in_flight: int | None) -> Sending:
    held = [sample for sample in samples if sample.held_ms > 0]
    skew = distribution([sample.skew_ms for sample in samples])
    why_not = None
    if held:
        why_not = f"{len(held)} of {len(samples)} requests waited for one of {max_in_flight} places in flight"
    elif skew.p99 is not None and skew.p99 > LATE_MS:
        why_not = f"the generator fell behind: p99 of its lateness is {skew.p99:.1f} ms"
    return Sending(
        requests=len(samples),
        open_loop=why_not is None,
        why_not=why_not,
        max_in_flight=max_in_flight,
        held_requests=len(held),
        lateness_ms=distribution([sample.lateness_ms for sample in samples]),
        held_ms=distribution([sample.held_ms for sample in held]),
        skew_ms=skew,
        socket_ms=distribution([s.written_ms - s.sent_ms for s in samples if s.written_ms is not None]),
        behind_plan_ms=distribution([s.due_ms - s.planned_ms for s in samples if s.planned_ms is not None]),
    )


class SessionWall(Struct, frozen=True):
    """One session from its first turn to the end of its last answer, failed turns included."""

    session_id: str
    turns: int
    failures: int
    from_due_ms: float
    from_sent_ms: float


def session_walls(samples: Iterable[Sample]) -> tuple[SessionWall, ...]:
    """In the order in which the sessions' first samples ended. Samples of one arm (and phase) only."""
    by_session: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_session[sample.session_id].append(sample)
    return tuple(_wall(name, own) for name, own in by_session.items())


def _wall(name: str, own: Sequence[Sample]) -> SessionWall:
    ended_ms = max(sample.ended_ms for sample in own)
    return SessionWall(
        session_id=name,
        turns=len(own),
        failures=sum(not sample.ok for sample in own),
        from_due_ms=round(ended_ms - min(sample.due_ms for sample in own), 3),
        from_sent_ms=round(ended_ms - min(sample.sent_ms for sample in own), 3),
    )
