"""Sessions and their homes against a naive model with explicit times."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.core.model.ids import SessionKey, TargetId, WorkerId
from kvrelay.core.routing.affinity import Affinity, Session

A, B, C = (TargetId(WorkerId(name, "1")) for name in "abc")
TTL_S = 10.0


@pytest.fixture
def affinity():
    return Affinity(ttl_s=TTL_S, max_sessions=3)


S = SessionKey("s")
SESSIONS = [SessionKey(name, tenant) for name in "st" for tenant in ("default", "other")] + [SessionKey("u")]


def take_turn(affinity: Affinity, now: float, key: SessionKey, target: TargetId, request_id: str = "r") -> Session:
    session = affinity.enter(now, key)
    affinity.propose(session, target, request_id)
    affinity.confirm(session, target, request_id)
    affinity.leave(now, session, request_id)
    affinity.check()
    return session


def home(affinity: Affinity, now: float, session_id: SessionKey = S) -> TargetId | None:
    session = affinity.peek(now, session_id)
    return None if session is None else session.home


@pytest.mark.covers("RT-05")
def test_a_failed_dispatch_leaves_no_binding(affinity):
    session = affinity.enter(0.0, S)
    affinity.propose(session, A, "r1")
    assert session.proposed == A and affinity.homes() == {}
    affinity.withdraw(session, "r1")
    affinity.leave(0.0, session, "r1")
    assert affinity.peek(0.0, S) is None and len(affinity) == 0


def test_a_confirmed_binding_survives_the_failure_of_a_later_turn(affinity):
    take_turn(affinity, 0.0, S, A)
    session = affinity.enter(1.0, S)
    affinity.propose(session, B, "r2")
    affinity.withdraw(session, "r2")
    assert session.home == A and session.proposed is None


def test_a_worker_that_failed_the_turn_that_founded_the_binding_loses_it(affinity):
    session = affinity.enter(0.0, S)
    affinity.propose(session, A, "r1")
    affinity.confirm(session, A, "r1")
    affinity.withdraw(session, "r1")
    assert session.home is None and len(affinity) == 0


@pytest.mark.covers("S32")
def test_a_binding_that_other_turns_use_survives_the_failure_of_its_founder(affinity):
    session = affinity.enter(0.0, S)
    affinity.propose(session, A, "r1")
    affinity.confirm(session, A, "r1")
    affinity.enter(0.0, S)
    affinity.confirm(session, A, "r2")
    affinity.withdraw(session, "r1")
    assert session.home == A


def test_turns_that_start_together_follow_the_first_and_who_left_proposes_nothing(affinity):
    session = affinity.enter(0.0, S)
    affinity.propose(session, A, "r1")
    assert affinity.enter(0.0, S) is session and session.proposed == A
    affinity.propose(session, A, "r2")
    affinity.leave(0.0, session, "r1")  # its client left before the worker had taken the request
    assert session.proposed is None
    affinity.confirm(session, A, "r2")
    assert session.home == A


def test_a_turn_taken_elsewhere_without_a_proposal_is_an_excursion(affinity):
    session = take_turn(affinity, 0.0, S, A)
    affinity.confirm(session, B, "r2")
    assert (session.home, session.second) == (A, B)


@pytest.mark.covers("RT-07")
def test_after_idle_time_beyond_the_ttl_the_session_is_unbound(affinity):
    take_turn(affinity, 0.0, S, A)
    assert home(affinity, 9.9) == A and affinity.next_expiry() == TTL_S
    assert home(affinity, 10.0) is None
    assert affinity.expire(10.0) == 1 and len(affinity) == 0 and affinity.next_expiry() is None


@pytest.mark.covers("RT-07")
def test_idle_time_begins_when_the_last_turn_ends(affinity):
    session = affinity.enter(0.0, S)
    affinity.propose(session, A, "r1")
    affinity.confirm(session, A, "r1")
    affinity.enter(1.0, S)
    affinity.leave(2.0, session, "r2")
    assert affinity.next_expiry() is None and affinity.expire(100.0) == 0 and home(affinity, 100.0) == A
    affinity.leave(100.0, session, "r1")
    assert affinity.next_expiry() == 110.0


@pytest.mark.covers("RT-08")
def test_without_a_ttl_nothing_is_ever_bound():
    affinity = Affinity(ttl_s=None, max_sessions=3)
    assert affinity.enter(0.0, S) is None and affinity.peek(0.0, S) is None


@pytest.mark.covers("SG-22")
def test_a_closed_session_does_not_revive(affinity):
    old = affinity.enter(0.0, S)
    affinity.propose(old, A, "r1")
    assert affinity.close(S) and not affinity.close(S)
    new = affinity.enter(0.0, S)
    affinity.propose(new, B, "r2")
    affinity.confirm(old, A, "r1")
    affinity.propose(old, C, "r1")
    affinity.confirm(old, C, "r1")
    affinity.leave(0.0, old, "r1")
    affinity.check()
    assert (new.home, new.proposed, new.turns) == (None, B, 1), (
        "what the old life's turn does says nothing of the new one"
    )


def test_a_session_remembers_that_its_worker_is_gone_until_it_has_another(affinity):
    take_turn(affinity, 0.0, S, A)
    take_turn(affinity, 0.0, SessionKey("t"), B)
    assert affinity.drop_worker(A.worker) == 1
    assert affinity.homes() == {SessionKey("t"): B} and len(affinity) == 1
    assert affinity.peek(1.0, S).lost_home
    assert not take_turn(affinity, 1.0, S, B).lost_home


def test_the_number_of_sessions_is_bounded_and_the_longest_idle_goes(affinity):
    busy = affinity.enter(0.0, SessionKey("v"))
    affinity.propose(busy, A, "r")
    affinity.confirm(busy, A, "r")
    for i, session in enumerate("wxyz"):
        take_turn(affinity, float(i), SessionKey(session), A)
    left = [key.session_id for key in affinity.homes()]
    assert left == ["v", "y", "z"], "a session with a turn under way is the last to go"
    for session in "stuv":
        affinity.enter(9.0, SessionKey(session))
    affinity.check()
    assert busy.ended, "when all are busy the bound still holds"


class NaiveAffinity(RuleBasedStateMachine):
    """Turns as dicts, the longest idle session found by searching."""

    def __init__(self):
        super().__init__()
        self.affinity = Affinity(ttl_s=TTL_S, max_sessions=3)
        self.model: dict[str, dict] = {}
        self.turns: dict[str, tuple] = {}  # request -> session id, the model's session, the real one
        self.now = 0.0
        self.requests = 0

    ids = st.sampled_from(SESSIONS)
    places = st.sampled_from([A, B])

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds

    def end(self, session_id):
        self.model.pop(session_id)["ended"] = True

    @rule(session_id=ids)
    def enter(self, session_id):
        self.requests += 1
        real = self.affinity.enter(self.now, session_id)
        entry = self.model.get(session_id)
        if entry is not None and not entry["turns"] and self.now - entry["idle"] >= TTL_S:
            self.end(session_id)
        fresh = {"home": None, "proposed": None, "by": None, "founder": None, "turns": set(), "idle": None}
        entry = self.model.setdefault(session_id, {**fresh, "lost": False, "ended": False})
        if len(self.model) > 3:
            idle = sorted(
                (e["idle"], i) for i, (_, e) in enumerate(self.model.items()) if not e["turns"] and e is not entry
            )
            self.end(list(self.model)[idle[0][1] if idle else 0])
        entry["turns"].add(str(self.requests))
        self.turns[str(self.requests)] = (session_id, entry, real)

    @rule(data=st.data(), place=places, step=st.sampled_from(["propose", "confirm", "withdraw", "leave"]))
    def act(self, data, place, step):
        if not self.turns:
            return
        request = data.draw(st.sampled_from(sorted(self.turns)))
        session_id, entry, real = self.turns[request]
        getattr(self, step)(request, session_id, entry, real, place)

    def propose(self, request, session_id, entry, real, target):
        self.affinity.propose(real, target, request)
        if target not in (entry["home"], entry["proposed"]):
            entry["proposed"], entry["by"] = target, request

    def confirm(self, request, session_id, entry, real, target):
        self.affinity.confirm(real, target, request)
        if entry["ended"]:
            return
        if target == entry["home"]:
            if entry["founder"] != request:
                entry["founder"] = None
        elif target == entry["proposed"] or (entry["home"] is None and entry["proposed"] is None):
            entry.update(home=target, founder=request, proposed=None, by=None, lost=False)

    def withdraw(self, request, session_id, entry, real, target):
        self.affinity.withdraw(real, request)
        if entry["by"] == request:
            entry.update(proposed=None, by=None)
        if entry["founder"] == request:
            entry.update(home=None, founder=None)

    def leave(self, request, session_id, entry, real, target):
        self.affinity.leave(self.now, real, request)
        del self.turns[request]
        entry["turns"].discard(request)
        if entry["by"] == request:
            entry.update(proposed=None, by=None)
        if entry["founder"] == request:
            entry["founder"] = None
        if not entry["ended"] and not entry["turns"]:
            entry["idle"] = self.now
            if entry["home"] is None and not entry["lost"]:
                self.end(session_id)

    @rule(session_id=ids)
    def close(self, session_id):
        known = session_id in self.model
        assert self.affinity.close(session_id) == known
        if known:
            self.model[session_id].update(home=None)
            self.end(session_id)

    @rule(place=places)
    def drop_worker(self, place):
        lost = [entry for entry in self.model.values() if entry["home"] == place]
        assert self.affinity.drop_worker(place.worker) == len(lost)
        for entry in lost:
            entry.update(home=None, founder=None, lost=True)
        for entry in self.model.values():
            if entry["proposed"] == place:
                entry.update(proposed=None, by=None)

    @rule()
    def expire(self):
        old = [i for i, e in self.model.items() if not e["turns"] and self.now - e["idle"] >= TTL_S]
        assert self.affinity.expire(self.now) == len(old)
        for session_id in old:
            self.end(session_id)

    @invariant()
    def agrees(self):
        self.affinity.check()
        assert self.affinity.homes() == {i: e["home"] for i, e in self.model.items() if e["home"] is not None}
        for session_id in SESSIONS:
            entry, real = self.model.get(session_id), self.affinity.peek(self.now, session_id)
            if entry is not None and not entry["turns"] and self.now - entry["idle"] >= TTL_S:
                entry = None
            seen = None if real is None else (real.home, real.proposed, real.lost_home, real.turns)
            expected = entry and (entry["home"], entry["proposed"], entry["lost"], len(entry["turns"]))
            assert seen == expected


NaiveAffinity.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class TestAgainstANaiveModel(NaiveAffinity.TestCase):
    pass
