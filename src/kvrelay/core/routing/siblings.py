"""What the processes of one gateway tell each other: where sessions are, and what load is booked.

A session is told of when it is bound, and taken back when the binding comes to nothing; of two placements of one
session the later one holds, everywhere. Without siblings nothing is told.
"""

from __future__ import annotations

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.effects import ShareSession
from kvrelay.core.model.events import SessionClosed, SiblingReported
from kvrelay.core.model.ids import SessionKey
from kvrelay.core.model.siblings import Placement, SiblingLoad
from kvrelay.core.routing.affinity import Affinity, Session
from kvrelay.core.routing.fleet import FleetView, Target


class Siblings:
    """Reads the fleet; changes sessions and load by what siblings say."""

    def __init__(self, *, has_any: bool, fleet: FleetView, affinity: Affinity, ledger: Ledger) -> None:
        self._has_any = has_any
        self._fleet = fleet
        self._affinity = affinity
        self._ledger = ledger

    # --- what they are told --------------------------------------------------------------------------------------

    def booked_load(self) -> tuple[SiblingLoad, ...]:
        """What we have booked; slots without anything are left out."""
        return tuple(
            load
            for worker in self._fleet.workers.values()
            for target in worker.targets
            if (load := self._ledger.booked(target.slot, worker.id.name, target.id.rank)) is not None
        )

    def placements(self) -> tuple[Placement, ...]:
        """Where all sessions are, for a sibling that is new."""
        return tuple(Placement(key, target.worker.name, target.rank, at) for key, target, at in self._affinity.shared())

    def share(self, now: float, session: Session | None) -> tuple[ShareSession, ...]:
        """What is new of a session."""
        if session is None or not self._has_any:
            return ()
        place = self._affinity.news(now, session)
        if place is not None:
            return (ShareSession(Placement(session.key, place.worker.name, place.rank, now)),)
        left = self._affinity.withdrawn_news(session)
        if left is not None:
            return (ShareSession(Placement(session.key, left.worker.name, left.rank, now, released=True)),)
        return ()

    def close_sessions(self, now: float, event: SessionClosed) -> tuple[ShareSession, ...]:
        keys = self._affinity.named(event.session_id, event.tenant)
        return tuple(effect for key in keys for effect in self._close(now, key))

    def _close(self, now: float, key: SessionKey) -> tuple[ShareSession, ...]:
        """Everybody closes it, and whoever had told the others of it takes that back: they may hear of it only now."""
        session = self._affinity.peek(now, key)
        self._affinity.close(key)
        if session is None or session.shared is None or not self._has_any:
            return ()
        told = session.shared
        return (ShareSession(Placement(key, told.worker.name, told.rank, now, released=True)),)

    # --- what they say -------------------------------------------------------------------------------------------

    def placed(self, now: float, placement: Placement) -> bool:
        """Whether the session has its worker here now. One that we do not know yet binds nothing here; the next turn
        that goes there will."""
        target = self._target_named(placement.worker, placement.rank)
        if target is None:
            return False
        if placement.released:
            self._affinity.released_elsewhere(placement.session, target.id)
            return False
        self._affinity.placed_elsewhere(now, placement.session, target.id, placement.at)
        return True

    def reported(self, now: float, event: SiblingReported) -> None:
        loads = {}
        for load in event.loads:
            target = self._target_named(load.worker, load.rank)
            if target is not None:
                loads[target.slot] = load
        self._ledger.sibling_reported(now, event.sibling, loads)

    def _target_named(self, name: str, rank: int) -> Target | None:
        worker = self._fleet.workers.get(name)
        return worker.targets[rank] if worker is not None and 0 <= rank < len(worker.targets) else None
