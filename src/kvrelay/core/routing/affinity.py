"""Where does a session belong?

A session is bound by a successful dispatch, not before: a worker that refuses the connection gets no binding. While the
first turn is on its way, its choice is proposed, so that turns which start meanwhile follow it: nobody waits, and one
binding results. A binding that cannot be followed stays until a turn has been taken elsewhere, and a turn that only
makes an excursion (its worker was full, or had failed it before) leaves it alone.

A session is idle, and its time to live runs, from the end of its last turn on: a long answer does not end it. Without a
time to live a session id is identity only and binds nothing.

Every turn holds the `Session` it began in. Closing, expiry and eviction end that object, and whoever still holds it can
no longer change anything: a late acceptance or retry does not revive a closed session, and the same id starts anew.
"""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.model.ids import SessionKey, TargetId, WorkerId

_TELL_AGAIN_SHARE = 0.05  # of the time to live


class Session(Struct, eq=False):
    """One life of one session id."""

    key: SessionKey
    home: TargetId | None = None  # where it is bound
    founder: str | None = None  # the request that made the binding, while nothing else speaks for it
    proposed: TargetId | None = None  # a turn is on its way there
    proposed_by: str | None = None
    second: TargetId | None = None  # took its last excursion
    lost_home: bool = False  # its worker is gone for good and no turn has been taken since
    turns: int = 0  # under way
    idle_since: float = 0.0  # meaningful without turns
    shared: TargetId | None = None  # what sibling processes were told last, or told us
    shared_at: float = 0.0
    ended: bool = False


class Affinity:
    """Sessions that are bound or have a turn under way; bounded."""

    def __init__(self, *, ttl_s: float | None, max_sessions: int) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._sessions: dict[SessionKey, Session] = {}
        self._idle: dict[SessionKey, Session] = {}  # those without turns, longest idle first
        self._tenants: dict[str, None] = {}  # who ever had one; tenants are of the configuration
        self._bound = 0

    def __len__(self) -> int:
        """Bound sessions."""
        return self._bound

    # --- a turn, from its arrival to its end -----------------------------------------------------------------------

    def enter(self, now: float, key: SessionKey) -> Session | None:
        """A turn begins; None where sessions bind nothing. Whoever enters must leave."""
        if self._ttl_s is None:
            return None
        session = self.peek(now, key)
        if session is None:
            session = self._begin(key)
        self._idle.pop(key, None)
        session.turns += 1
        return session

    def peek(self, now: float, key: SessionKey) -> Session | None:
        """The session as the next turn would find it. Changes nothing."""
        session = self._sessions.get(key)
        return None if session is None or self._expired(now, session) else session

    def propose(self, session: Session, target: TargetId, request_id: str) -> None:
        """A turn is sent to `target`, which is to become the session's home once it has taken it."""
        if target not in (session.home, session.proposed):
            session.proposed, session.proposed_by = target, request_id

    def confirm(self, session: Session, target: TargetId, request_id: str) -> None:
        """`target` took a turn."""
        if session.ended:
            return
        if target == session.home:
            if session.founder != request_id:
                session.founder = None  # another turn speaks for it as well
        elif target == session.proposed or (session.home is None and session.proposed is None):
            self._bind(session, target)
            session.founder = request_id
        else:
            session.second = target

    def withdraw(self, session: Session, request_id: str) -> None:
        """A dispatch failed: what this request alone proposed or founded goes."""
        if session.proposed_by == request_id:
            session.proposed = session.proposed_by = None
        if session.founder == request_id:
            self._unbind(session)

    def leave(self, now: float, session: Session, request_id: str) -> None:
        """The turn ended. What it proposed and nobody took goes with it; what it founded stands from now on."""
        session.turns -= 1
        if session.proposed_by == request_id:
            session.proposed = session.proposed_by = None
        if session.founder == request_id:
            session.founder = None
        if session.turns or session.ended:
            return
        session.idle_since = now
        if session.home is None and not session.lost_home:
            self.close(session.key)
        else:
            self._idle[session.key] = session

    # --- between the processes of one gateway -----------------------------------------------------------------------

    def news(self, now: float, session: Session) -> TargetId | None:
        """Where siblings are to be told that the session is now; None: they know, or there is nothing to tell.

        A session in use is told of again from time to time, so that it does not end elsewhere.
        """
        place = session.home or session.proposed
        if place is None or session.ended or self._ttl_s is None:
            return None
        if place == session.shared and now - session.shared_at < self._ttl_s * _TELL_AGAIN_SHARE:
            return None
        session.shared, session.shared_at = place, now
        return place

    def withdrawn_news(self, session: Session) -> TargetId | None:
        """Where siblings were told that the session is, if it no longer is anywhere."""
        if session.shared is None or session.home is not None or session.proposed is not None:
            return None
        place, session.shared = session.shared, None
        return place

    def placed_elsewhere(self, now: float, key: SessionKey, target: TargetId, at: float) -> None:
        """A sibling bound the session, at a time of our clock. The later binding holds; both sides decide alike."""
        if self._ttl_s is None:
            return
        session = self.peek(now, key) or self._begin(key)
        if session.shared not in (None, target) and (at, target) < (session.shared_at, session.shared):
            return
        if target != session.home:
            self._bind(session, target)
            session.founder = None
        session.shared, session.shared_at = target, max(at, session.shared_at)
        if not session.turns:
            self._idle.pop(key, None)
            session.idle_since = now
            self._idle[key] = session

    def released_elsewhere(self, key: SessionKey, target: TargetId) -> None:
        """A sibling's binding came to nothing. It stays where a turn of ours speaks for it."""
        session = self._sessions.get(key)
        if session is not None and not session.turns and session.home == session.shared == target:
            self.close(key)

    # --- what ends a session or its binding ------------------------------------------------------------------------

    def close(self, key: SessionKey) -> bool:
        """The session ended; True if there was one."""
        session = self._sessions.pop(key, None)
        if session is None:
            return False
        self._idle.pop(key, None)
        self._unbind(session)
        session.ended = True
        return True

    def drop_worker(self, worker: WorkerId) -> int:
        """The worker is gone for good; answers how many sessions lost their home. They remember that they had one."""
        lost = 0
        for session in self._sessions.values():
            if session.home is not None and session.home.worker == worker:
                self._unbind(session)
                session.lost_home = True
                lost += 1
            if session.proposed is not None and session.proposed.worker == worker:
                session.proposed = session.proposed_by = None
            if session.second is not None and session.second.worker == worker:
                session.second = None
        return lost

    def expire(self, now: float) -> int:
        """Close what was idle for too long; answers how many."""
        expired = 0
        while self._idle:
            key, session = next(iter(self._idle.items()))
            if not self._expired(now, session):
                break
            self.close(key)
            expired += 1
        return expired

    def next_expiry(self) -> float | None:
        """When the longest idle session runs out."""
        if self._ttl_s is None or not self._idle:
            return None
        return next(iter(self._idle.values())).idle_since + self._ttl_s

    def change(self, *, ttl_s: float | None) -> None:
        """Idle sessions live this long from now on, those that are there as well."""
        self._ttl_s = ttl_s
        if ttl_s is None:
            for key in tuple(self._sessions):
                self.close(key)

    # --- questions ---------------------------------------------------------------------------------------------------

    def shared(self) -> list[tuple[SessionKey, TargetId, float]]:
        """All bindings that a new sibling should know, with the time of the last word about them."""
        bound = (session for session in self._sessions.values() if session.home is not None)
        return [(session.key, session.home, session.shared_at) for session in bound if session.home is not None]

    def named(self, session_id: str, tenant: str | None) -> list[SessionKey]:
        """The sessions of this id, of one tenant or (None) of all."""
        keys = [SessionKey(session_id, name) for name in self._tenants if tenant in (None, name)]
        return [key for key in keys if key in self._sessions]

    def homes(self) -> dict[SessionKey, TargetId]:
        """All bindings."""
        return {key: session.home for key, session in self._sessions.items() if session.home is not None}

    def check(self) -> None:
        """Assert what must always hold."""
        assert self._bound == sum(session.home is not None for session in self._sessions.values())
        assert len(self._sessions) <= self._max_sessions
        for key, session in self._sessions.items():
            assert not session.ended and session.turns >= 0
            assert (key in self._idle) == (session.turns == 0)
        assert self._idle.keys() <= self._sessions.keys()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, key: SessionKey) -> Session:
        """In the place of one that is over, perhaps; the longest idle one gives way."""
        self.close(key)
        session = self._sessions[key] = Session(key)
        self._tenants[key.tenant] = None
        if len(self._sessions) > self._max_sessions:
            self.close(next(iter(self._idle or self._sessions)))
        return session

    def _bind(self, session: Session, target: TargetId) -> None:
        self._bound += session.home is None
        session.home, session.lost_home = target, False
        session.proposed = session.proposed_by = session.second = None

    def _unbind(self, session: Session) -> None:
        self._bound -= session.home is not None
        session.home = session.founder = None

    def _expired(self, now: float, session: Session) -> bool:
        """By the very sum of `next_expiry`: a difference rounds otherwise, and who wakes would find nothing due."""
        return self._ttl_s is None or (session.turns == 0 and now >= session.idle_since + self._ttl_s)
