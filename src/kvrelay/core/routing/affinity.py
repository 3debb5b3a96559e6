"""Which worker does a session belong to?

A binding is made after a successful dispatch, not before: a worker that refuses the connection gets none. While the
first turn is on its way, its choice is proposed, so that further turns of the session that start meanwhile follow it
and one binding results. Without a time to live a session id is identity only and binds nothing. A closed session does
not revive: the same id starts anew.
"""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.model.ids import WorkerId


class Binding(Struct):
    """One session's worker. `confirmed` once a worker has taken a turn; `proposed_by` until then."""

    worker: WorkerId
    used_at: float
    proposed_by: str | None


class Affinity:
    """Bindings in order of last use, bounded. Every method that takes `now` treats an expired binding as absent."""

    def __init__(self, *, ttl_s: float | None, max_sessions: int) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._bindings: dict[str, Binding] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._bindings)

    @property
    def enabled(self) -> bool:
        return self._ttl_s is not None

    def bound(self, now: float, session_id: str) -> WorkerId | None:
        """The session's worker, proposed or confirmed. Changes nothing."""
        binding = self._bindings.get(session_id)
        if binding is None or self._expired(now, binding):
            return None
        return binding.worker

    def propose(self, now: float, session_id: str, worker: WorkerId, request_id: str) -> None:
        """A turn is being dispatched. Refreshes an equal binding, replaces another, evicts the oldest if full."""
        if self._ttl_s is None:
            return
        old = self._bindings.pop(session_id, None)
        confirmed = old is not None and old.worker == worker and old.proposed_by is None and not self._expired(now, old)
        self._bindings[session_id] = Binding(worker, now, None if confirmed else request_id)
        if len(self._bindings) > self._max_sessions:
            del self._bindings[next(iter(self._bindings))]

    def confirm(self, now: float, session_id: str, worker: WorkerId) -> None:
        """The worker took the turn."""
        binding = self._bindings.get(session_id)
        if binding is not None and binding.worker == worker:
            del self._bindings[session_id]
            self._bindings[session_id] = Binding(worker, now, None)

    def withdraw(self, session_id: str, request_id: str) -> None:
        """The dispatch failed; what it proposed goes, unless another turn confirmed it meanwhile."""
        binding = self._bindings.get(session_id)
        if binding is not None and binding.proposed_by == request_id:
            del self._bindings[session_id]

    def close(self, session_id: str) -> bool:
        """The session ended; True if it was bound."""
        return self._bindings.pop(session_id, None) is not None

    def drop_worker(self, worker: WorkerId) -> int:
        """The worker is gone for good; answers how many sessions lost their binding."""
        lost = [session_id for session_id, binding in self._bindings.items() if binding.worker == worker]
        for session_id in lost:
            del self._bindings[session_id]
        return len(lost)

    def expire(self, now: float) -> int:
        """Drop what is past its time; answers how many."""
        expired = 0
        while self._bindings:
            session_id, binding = next(iter(self._bindings.items()))
            if not self._expired(now, binding):
                break
            del self._bindings[session_id]
            expired += 1
        return expired

    def next_expiry(self) -> float | None:
        """When the oldest binding runs out."""
        if self._ttl_s is None or not self._bindings:
            return None
        return next(iter(self._bindings.values())).used_at + self._ttl_s

    def sessions(self) -> dict[str, WorkerId]:
        """All bindings, least recently used first."""
        return {session_id: binding.worker for session_id, binding in self._bindings.items()}

    def _expired(self, now: float, binding: Binding) -> bool:
        return self._ttl_s is None or now - binding.used_at >= self._ttl_s
