"""Session bindings against a naive model with explicit times."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.core.model.ids import WorkerId
from kvrelay.core.routing.affinity import Affinity

A, B = WorkerId("a", "1"), WorkerId("b", "1")
TTL_S = 10.0


@pytest.fixture
def affinity():
    return Affinity(ttl_s=TTL_S, max_sessions=3)


@pytest.mark.covers("RT-05")
def test_a_failed_dispatch_leaves_no_binding(affinity):
    affinity.propose(0.0, "s", A, "r1")
    affinity.withdraw("s", "r1")
    assert affinity.bound(0.0, "s") is None and len(affinity) == 0


def test_a_confirmed_binding_survives_the_failure_of_a_later_turn(affinity):
    affinity.propose(0.0, "s", A, "r1")
    affinity.confirm(0.0, "s", A)
    affinity.propose(1.0, "s", A, "r2")
    affinity.withdraw("s", "r2")
    assert affinity.bound(1.0, "s") == A


def test_turns_that_start_together_follow_the_first(affinity):
    affinity.propose(0.0, "s", A, "r1")
    assert affinity.bound(0.0, "s") == A


@pytest.mark.covers("RT-07")
def test_after_idle_time_beyond_the_ttl_the_session_is_unbound(affinity):
    affinity.propose(0.0, "s", A, "r1")
    affinity.confirm(0.0, "s", A)
    assert affinity.bound(9.9, "s") == A and affinity.next_expiry() == TTL_S
    assert affinity.bound(10.0, "s") is None
    assert affinity.expire(10.0) == 1 and len(affinity) == 0


@pytest.mark.covers("RT-08")
def test_without_a_ttl_nothing_is_ever_bound():
    affinity = Affinity(ttl_s=None, max_sessions=3)
    affinity.propose(0.0, "s", A, "r1")
    affinity.confirm(0.0, "s", A)
    assert affinity.bound(0.0, "s") is None and not affinity.enabled


@pytest.mark.covers("SG-22")
def test_a_closed_session_does_not_revive(affinity):
    affinity.propose(0.0, "s", A, "r1")
    assert affinity.close("s") and not affinity.close("s")
    affinity.confirm(0.0, "s", A)
    assert affinity.bound(0.0, "s") is None, "a late confirmation of the closed session's turn binds nothing"


def test_the_number_of_sessions_is_bounded_and_the_oldest_goes(affinity):
    for i, session in enumerate("wxyz"):
        affinity.propose(float(i), session, A, session)
    assert list(affinity.sessions()) == ["x", "y", "z"]


class NaiveAffinity(RuleBasedStateMachine):
    """session -> (worker, used at, proposer), with the oldest found by searching."""

    def __init__(self):
        super().__init__()
        self.affinity = Affinity(ttl_s=TTL_S, max_sessions=3)
        self.model: dict[str, tuple] = {}
        self.now = 0.0
        self.turn = 0

    sessions = st.sampled_from("stuvw")
    workers = st.sampled_from([A, B])

    def current(self, session):
        entry = self.model.get(session)
        return None if entry is None or self.now - entry[1] >= TTL_S else entry

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(session=sessions, worker=workers)
    def propose(self, session, worker):
        self.turn += 1
        self.affinity.propose(self.now, session, worker, str(self.turn))
        old = self.current(session)
        confirmed = old is not None and old[0] == worker and old[2] is None
        self.model.pop(session, None)
        self.model[session] = (worker, self.now, None if confirmed else str(self.turn))
        if len(self.model) > 3:
            del self.model[next(iter(self.model))]

    @rule(session=sessions, worker=workers)
    def confirm(self, session, worker):
        self.affinity.confirm(self.now, session, worker)
        if session in self.model and self.model[session][0] == worker:
            del self.model[session]
            self.model[session] = (worker, self.now, None)

    @rule(session=sessions, back=st.integers(0, 3))
    def withdraw(self, session, back):
        request = str(self.turn - back)
        self.affinity.withdraw(session, request)
        if session in self.model and self.model[session][2] == request:
            del self.model[session]

    @rule(session=sessions)
    def close(self, session):
        assert self.affinity.close(session) == (self.model.pop(session, None) is not None)

    @rule(worker=workers)
    def drop_worker(self, worker):
        lost = [s for s, entry in self.model.items() if entry[0] == worker]
        assert self.affinity.drop_worker(worker) == len(lost)
        for session in lost:
            del self.model[session]

    @rule()
    def expire(self):
        old = [s for s, entry in self.model.items() if self.now - entry[1] >= TTL_S]
        assert self.affinity.expire(self.now) == len(old)
        for session in old:
            del self.model[session]

    @invariant()
    def agrees(self):
        assert self.affinity.sessions() == {s: entry[0] for s, entry in self.model.items()}
        for session in "stuvw":
            entry = self.current(session)
            assert self.affinity.bound(self.now, session) == (entry[0] if entry else None)


NaiveAffinity.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class TestAgainstANaiveModel(NaiveAffinity.TestCase):
    pass
