"""Several routers of one gateway: sessions are bound to one worker, and everybody's load counts once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.model.effects import ShareSession
from kvrelay.core.model.events import (
    FirstTokenSeen,
    LoadReported,
    SessionClosed,
    SessionPlaced,
    SiblingReported,
    WokeUp,
)
from kvrelay.core.model.ids import SessionKey
from kvrelay.core.model.siblings import Placement, SiblingLoad
from kvrelay.core.model.units import Fault, RouteReason
from tests.core.routing.rig import Rig, chosen, text


class Pair:
    """Two routers with the same workers and one clock. What they tell each other waits until `exchange`."""

    def __init__(self, **more) -> None:
        self.rigs = tuple(Rig(has_siblings=True, **{"policy": "sticky", **more}) for _ in range(2))
        for rig in self.rigs:
            rig.join("a", "b", "c")
        self.rigs[1].ask(text(9))  # round robin of the second one stands elsewhere
        self.rigs[1].finish()
        self.told = [len(rig.effects) for rig in self.rigs]

    def exchange(self) -> None:
        for at, rig in enumerate(self.rigs):
            placements = [each.placement for each in rig.effects[self.told[at] :] if isinstance(each, ShareSession)]
            for placement in placements:
                self.rigs[1 - at].step(SessionPlaced(placement))
            self.rigs[1 - at].step(SiblingReported(at, rig.router.booked_load()))
        self.told = [len(rig.effects) for rig in self.rigs]

    def tick(self, seconds: float = 0.0) -> None:
        now = max(rig.now for rig in self.rigs) + 0.001 + seconds
        for rig in self.rigs:
            rig.now = now

    def home(self, session_id: str) -> list[str | None]:
        homes = [rig.router.sessions().get(SessionKey(session_id)) for rig in self.rigs]
        return [None if home is None else home.worker.name for home in homes]


@pytest.mark.covers("RT-06")
def test_a_session_that_is_bound_here_is_bound_there_before_its_first_turn_is_taken() -> None:
    pair = Pair()
    one, two = pair.rigs
    worker = one.ask(text(1), session_id="s")
    pair.exchange()
    assert two.ask(text(1), session_id="s") == worker
    assert two.finish().route_reason is RouteReason.STICKY_BOUND
    one.accept()
    one.finish()
    pair.exchange()
    assert pair.home("s") == [worker, worker]


@pytest.mark.covers("RT-05")
def test_a_binding_that_comes_to_nothing_is_taken_back_everywhere() -> None:
    pair = Pair(retry_attempts=1)
    one, _ = pair.rigs
    worker = one.ask(text(1), session_id="s")
    pair.exchange()
    assert pair.home("s") == [None, worker]
    one.fail(Fault.CONNECT)
    pair.exchange()
    assert pair.home("s") == [None, None]


def test_first_turns_at_the_same_moment_end_in_one_binding() -> None:
    pair = Pair()
    one, two = pair.rigs
    first = one.ask(text(1), session_id="s")
    pair.tick()
    second = two.ask(text(1), session_id="s")
    assert first != second, "the window: neither knew of the other"
    pair.exchange()
    for rig in pair.rigs:
        rig.accept()
        rig.finish()
    pair.exchange()
    pair.exchange()
    home = pair.home("s")
    assert home[0] == home[1] is not None
    assert [rig.ask(text(1), session_id="s") for rig in pair.rigs] == home


def test_a_session_that_moved_moves_everywhere() -> None:
    pair = Pair()
    one, two = pair.rigs
    old = one.serve(text(1), session_id="s").chosen_worker
    pair.exchange()
    pair.tick()
    two.leave(old)
    new = two.serve(text(1), session_id="s").chosen_worker
    pair.exchange()
    assert new != old and pair.home("s") == [new, new]


@pytest.mark.covers("RT-07")
def test_a_session_lives_where_it_is_not_used_as_long_as_it_is_used_elsewhere() -> None:
    pair = Pair(affinity_ttl_s=100.0)
    one, two = pair.rigs
    for _ in range(8):
        one.serve(text(1), session_id="s")
        pair.exchange()
        pair.tick(40.0)
        two.step(WokeUp())
    assert None not in pair.home("s")
    pair.tick(100.0)
    two.step(WokeUp())
    assert pair.home("s")[1] is None


def test_turns_in_quick_succession_are_told_of_once() -> None:
    pair = Pair(affinity_ttl_s=100.0)
    one, _ = pair.rigs
    for _ in range(10):
        one.serve(text(1), session_id="s")
    assert sum(isinstance(effect, ShareSession) for effect in one.effects) == 1


def test_a_new_sibling_learns_of_all_sessions() -> None:
    pair = Pair()
    one, two = pair.rigs
    worker = one.serve(text(1), session_id="s").chosen_worker
    assert [each.session for each in one.router.placements()] == [SessionKey("s")]
    for placement in one.router.placements():
        two.step(SessionPlaced(placement))
    assert pair.home("s") == [worker, worker]


def test_what_is_told_of_a_worker_that_is_not_known_here_binds_nothing() -> None:
    (rig, _) = Pair().rigs
    assert rig.step(SessionPlaced(Placement(SessionKey("s"), "nobody", 0, 1.0))) == ()
    assert rig.step(SessionPlaced(Placement(SessionKey("s"), "a", 7, 1.0))) == ()
    assert rig.router.sessions() == {}


def test_a_router_alone_tells_nobody() -> None:
    rig = Rig(policy="sticky")
    rig.join("a")
    rig.serve(text(1), session_id="s")
    assert not any(isinstance(effect, ShareSession) for effect in rig.effects)


@pytest.mark.covers("SG-22")
def test_word_of_a_closed_session_that_comes_late_does_not_revive_it() -> None:
    pair = Pair()
    one, two = pair.rigs
    two.serve(text(1), session_id="s")  # `one` has not heard of it yet
    one.step(SessionClosed("s"))
    pair.exchange()
    assert pair.home("s")[0] is not None, "the news was older than the closing, and came after it"
    two.step(SessionClosed("s"))
    pair.exchange()
    assert pair.home("s") == [None, None]


steps = st.lists(
    st.tuples(
        st.integers(0, 1), st.sampled_from(["ask", "finish", "fail", "close", "exchange"]), st.sampled_from("st")
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(steps)
def test_processes_that_have_told_each_other_everything_agree(moves) -> None:
    pair = Pair(retry_attempts=1)
    running: list[list[str]] = [[], []]
    for at, move, session_id in moves:
        rig = pair.rigs[at]
        pair.tick()
        if move == "ask":
            rig.ask(text(1), session_id=session_id)
            if rig.receipts and rig.receipts[-1].request_id == rig.last:
                continue  # refused: nobody is left
            rig.accept()
            running[at].append(rig.last)
        elif move == "finish" and running[at]:
            rig.finish(running[at].pop(0))
        elif move == "fail" and running[at]:
            rig.fail(Fault.RESET, running[at].pop(0), relayed=True)
        elif move == "close":
            for each in pair.rigs:
                each.step(SessionClosed(session_id))
        elif move == "exchange":
            pair.exchange()
    for at, rig in enumerate(pair.rigs):
        while running[at]:
            rig.finish(running[at].pop(0))
    for _ in range(3):
        pair.exchange()
    for session_id in "st":
        one, two = pair.home(session_id)
        assert one == two or None in (one, two), "bound to two workers"


# --- load ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["least_load", "cache_load"])
def test_load_of_siblings_counts_in_decisions_and_not_as_ours(policy: str) -> None:
    pair = Pair(policy=policy)
    one, two = pair.rigs
    busy = {one.ask(text(n)) for n in range(2)}
    pair.exchange()
    (free,) = {"a", "b", "c"} - busy
    assert two.ask(text(9)) == free
    assert two.load(free)[0] == 1 and [two.load(name)[0] for name in sorted(busy)] == [0, 0]


def test_what_siblings_booked_is_not_taken_for_foreign_load() -> None:
    pair = Pair(policy="least_load")
    one, two = pair.rigs
    worker = one.ask(text(1))
    pair.exchange()
    for running, foreign in ((1, 0), (4, 3)):
        two.step(LoadReported(two.live_id(worker), 0, running_requests=running, waiting_requests=0))
        (target,) = next(w for w in two.router.status(two.now).workers if w.name == worker).targets
        assert target.foreign_requests == foreign


def test_limits_of_workers_hold_over_all_processes() -> None:
    rigs = [Rig(queue_depth=5, has_siblings=True) for _ in range(2)]
    for rig in rigs:
        rig.join("a", max_active_requests=1)
    one, two = rigs
    assert one.ask(text(1)) == "a"
    two.step(SiblingReported(0, one.router.booked_load()))
    assert two.ask(text(1)) is None
    one.finish()
    assert chosen(two.step(SiblingReported(0, one.router.booked_load()))) == "a", "who waits is served at once"


def test_a_sibling_that_is_gone_takes_its_load_along() -> None:
    pair = Pair()
    one, two = pair.rigs
    one.ask(text(1))
    pair.exchange()
    before = two.router.booked_load()
    two.step(SiblingReported(0, ()))
    two.router.check()
    assert two.router.booked_load() == before
    assert not two.router._ledger.siblings.prefilling_requests


def test_what_siblings_prefill_teaches_the_rate_of_the_worker() -> None:
    rig = Rig(has_siblings=True, initial_prefill_tokens_per_s=8000.0)
    rig.join("a")

    def told(queued: int, prefill_tokens: int, done_tokens: int) -> None:
        rig.step(SiblingReported(1, (SiblingLoad("a", 0, 1, queued, prefill_tokens, 0, done_tokens),)))

    told(1, 1000, 0)
    rig.now += 1.0
    told(0, 0, 1000)
    (target,) = rig.router.status(rig.now).workers[0].targets
    assert target.prefill_tokens_per_s == pytest.approx(1000, rel=0.01)


def test_load_of_the_first_token_moves_from_prefill_to_decode_elsewhere_too() -> None:
    pair = Pair()
    one, _ = pair.rigs
    one.ask(text(1, blocks=4))
    (load,) = one.router.booked_load()
    assert (load.queued_requests, load.active_prefill_tokens, load.active_decode_blocks) == (1, 65, 0)
    one.step(FirstTokenSeen(one.last))
    (load,) = one.router.booked_load()
    assert (load.queued_requests, load.active_prefill_tokens, load.active_decode_blocks) == (0, 0, 5)
    assert load.prefilled_tokens == 65
