"""Each policy through the router: who is chosen, and with which reason."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.model.events import FirstTokenSeen, LoadReported, PolicyChanged, ProbeAnswered
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.registry import POLICIES, UnknownName, make_policy
from kvrelay.core.routing.settings import Spill, Weights
from tests.core.routing.rig import SIZE, Rig, text
from tests.core.routing.virtual import VirtualFleet


@pytest.mark.covers("RT-02")
@pytest.mark.parametrize("indexed", [False, True])
def test_round_robin_counts_are_equal_whatever_the_index_holds(indexed):
    rig = Rig(policy="round_robin")
    rig.join("a", "b", "c", "d")
    prompt = text(1, 2, 3)
    if indexed:
        rig.hold("a", prompt)
    order = [rig.serve(prompt).chosen_worker for _ in range(400)]
    assert Counter(order) == dict.fromkeys("abcd", 100)
    assert order[:8] == list("abcdabcd")


def test_round_robin_keeps_its_turn_when_a_worker_is_away():
    rig = Rig(policy="round_robin", health_failures=1)
    rig.join("a", "b", "c")
    assert rig.ask() == "a"
    rig.step(ProbeAnswered(rig.live_id("b"), ok=False))
    assert [rig.ask() for _ in range(3)] == ["c", "a", "c"]


@pytest.mark.covers("RT-03")
def test_random_is_reproducible_by_its_draws_and_even():
    def run(seed):
        draws = random.Random(seed)
        rig = Rig(policy="random")
        rig.join("a", "b", "c", "d")
        return [rig.serve(draw=draws.getrandbits(64)).chosen_worker for _ in range(600)]

    assert run(1) == run(1) != run(2)
    counts = Counter(run(1))
    chi_square = sum((count - 150) ** 2 / 150 for count in counts.values())
    assert chi_square < 16.27, "p < 0.001 for three degrees of freedom"


@pytest.mark.covers("RT-04")
def test_sticky_spreads_first_turns_evenly():
    rig = Rig(policy="sticky")
    rig.join("a", "b", "c", "d")
    receipts = [rig.serve(session_id=f"s{i}") for i in range(100)]
    assert Counter(r.chosen_worker for r in receipts) == dict.fromkeys("abcd", 25)
    assert {r.route_reason for r in receipts} == {RouteReason.STICKY_FIRST}


@pytest.mark.covers("RT-06")
def test_sticky_returns_exactly_while_healthy():
    rig = Rig(policy="sticky")
    rig.join("a", "b", "c", "d")
    bound = {f"s{i}": rig.serve(session_id=f"s{i}").chosen_worker for i in range(10)}
    for _ in range(5):
        for session, worker in bound.items():
            receipt = rig.serve(session_id=session)
            assert (receipt.chosen_worker, receipt.route_reason) == (worker, RouteReason.STICKY_BOUND)


@pytest.mark.covers("RT-08")
def test_without_a_ttl_the_session_id_is_identity_only():
    rig = Rig(policy="sticky", affinity_ttl_s=None)
    rig.join("a", "b")
    assert [rig.serve(session_id="s").chosen_worker for _ in range(4)] == list("abab")


@pytest.mark.covers("RT-15")
@pytest.mark.parametrize("scorer", ["weights", "predict"])
@pytest.mark.parametrize("kind", ["prefill", "decode", "queue"])
def test_each_kind_of_load_alone_moves_the_choice_away(scorer, kind):
    rig = Rig(scorer=scorer, weights=Weights(beta=0.01, gamma=0.1))
    rig.join("a", "b")
    if kind == "queue":
        rig.step(LoadReported(rig.live_id("a"), running_requests=0, waiting_requests=5))
        rig.step(LoadReported(rig.live_id("b"), running_requests=0, waiting_requests=0))
    else:
        book_prefill(rig, "a", 320)
    if kind == "decode":
        rig.now += 0.04  # at the presumed rate, so that nothing is learned about speed
        rig.step(FirstTokenSeen(rig.last))
    for draw in (0, 1):
        assert rig.ask(text(5), draw=draw) == "b"
        rig.now += 0.002
        rig.finish()


@pytest.mark.covers("RT-16")
@pytest.mark.parametrize("scorer", ["weights", "predict"])
def test_with_equal_load_the_one_with_fewer_missing_tokens_wins(scorer):
    rig = Rig(scorer=scorer)
    rig.join("a", "b", "c")
    prompt = text(1, 2, 3, 4, blocks=10)
    rig.hold("b", prompt[: 30 * SIZE])
    rig.hold("c", prompt[: 20 * SIZE])
    receipt = rig.serve(prompt)
    assert receipt.chosen_worker == "b" and receipt.route_reason is RouteReason.CACHE_PLUS_LOAD


@pytest.mark.covers("RT-20", "RC-12")
def test_the_worked_example_a_55_against_b_75():
    """100 eligible blocks; A holds 100 and is busy (debit 45), B holds 80 and has one in its queue (debit 5)."""
    rig = Rig(scorer="weights", weights=Weights(alpha=1.0, beta=0.05, gamma=0.0, delta=0.0))
    rig.join("A", "B")
    prompt = text(1, blocks=100)
    rig.hold("A", prompt)
    rig.hold("B", prompt[: 80 * SIZE])
    book_prefill(rig, "A", 900)
    book_prefill(rig, "B", 100)
    rig.arrive(prompt, request_id="s17-t2", session_id="s17")
    rig.accept("s17-t2")
    receipt = rig.finish("s17-t2", cached=76 * SIZE)
    scores = {candidate.worker: candidate.score for candidate in receipt.candidates}
    terms = {candidate.worker: candidate.terms for candidate in receipt.candidates}
    assert scores == {"A": 55.0, "B": 75.0}
    assert terms["A"] == {"reuse_credit": 100.0, "prefill_debit": -45.0, "decode_debit": 0.0, "transfer_debit": 0.0}
    assert terms["B"] == {"reuse_credit": 80.0, "prefill_debit": -5.0, "decode_debit": 0.0, "transfer_debit": 0.0}
    assert receipt.chosen_worker == "B" and receipt.worker_queue_at_route == 1
    assert receipt.route_reason is RouteReason.CACHE_SPILL and receipt.spilled_from == "A"
    assert (receipt.eligible_prefix_blocks, receipt.matched_blocks_at_route, receipt.actual_local_hits) == (100, 80, 76)


def book_prefill(rig: Rig, worker: str, tokens: int) -> None:
    """One unscored request in the worker's queue, as large as wanted."""
    others = [w.name for w in rig.router.status(rig.now).workers if w.name != worker]
    for name in others:
        rig.step(ProbeAnswered(rig.live_id(name), ok=False))
        rig.step(ProbeAnswered(rig.live_id(name), ok=False))
    assert rig.ask(prompt_tokens=tokens) == worker
    for name in others:
        rig.step(ProbeAnswered(rig.live_id(name), ok=True))


@pytest.mark.covers("RT-10", "RC-15")
@pytest.mark.parametrize("scorer", ["weights", "predict"])
@given(
    held=st.lists(st.integers(0, 12), min_size=2, max_size=6),
    busy=st.lists(st.integers(0, 3_000), min_size=2, max_size=6),
    weights=st.tuples(*[st.floats(0, 3)] * 4),
)
def test_the_terms_of_every_candidate_add_up_to_its_score_and_the_best_is_chosen(scorer, held, busy, weights):
    rig = Rig(scorer=scorer, weights=Weights(*weights))
    names = [f"w{i}" for i in range(len(held))]
    rig.join(*names)
    prompt = text(*range(12))
    for name, blocks in zip(names, held, strict=True):
        if blocks:
            rig.hold(name, prompt[: blocks * SIZE])
    for tokens in busy:
        rig.ask(prompt_tokens=tokens)
    receipt = rig.serve(prompt)
    for candidate in receipt.candidates:
        assert sum(candidate.terms.values()) == pytest.approx(candidate.score)
    scores = [candidate.score for candidate in receipt.candidates]
    best = max(scores) if scorer == "weights" else min(scores)
    margin = 0.0 if scorer == "weights" else best * 0.05 + 1.0
    assert receipt.candidates[0].worker == receipt.chosen_worker
    assert abs(scores[0] - best) <= margin + 1e-9


@pytest.mark.covers("RT-11")
@pytest.mark.parametrize("scorer", ["weights", "predict"])
def test_a_tie_goes_by_load_then_by_the_draw_and_says_so(scorer):
    def first(draw):
        rig = Rig(scorer=scorer)
        rig.join("a", "b", "c")
        receipt = rig.serve(text(1), draw=draw)
        return receipt.chosen_worker, receipt.route_reason

    assert [first(draw) for draw in (0, 1, 2, 3, 0)] == [(name, RouteReason.TIE_BREAK) for name in "abcaa"]


def test_least_load_takes_the_idle_one():
    rig = Rig(policy="least_load")
    rig.join("a", "b", "c")
    assert sorted(rig.ask(draw=7) for _ in range(3)) == ["a", "b", "c"]


@pytest.mark.covers("S05")
@pytest.mark.parametrize("scorer", ["weights", "predict"])
def test_how_much_a_worker_has_cached_is_no_reason_for_a_prompt_without_overlap(scorer):
    rig = Rig(scorer=scorer)
    rig.join("a", "b")
    rig.hold("a", text(1))
    for i in range(40):
        rig.hold("b", text(1_000 + i, blocks=5))
    for _ in range(20):
        book_prefill(rig, "a", 500)
    picks = [rig.ask(text(50 + i, blocks=30)) for i in range(24)]
    assert picks[:10] == ["b"] * 10 and "a" in picks, (
        "to b until the loads, with what will come of them, are comparable"
    )


@pytest.mark.covers("S03", "RT-15")
@pytest.mark.parametrize("scorer", ["weights", "predict"])
def test_a_burst_between_two_scrapes_is_spread_and_not_counted_twice(scorer):
    rig = Rig(scorer=scorer)
    rig.join("a", "b")
    rig.step(LoadReported(rig.live_id("a"), running_requests=0, waiting_requests=0))
    rig.step(LoadReported(rig.live_id("b"), running_requests=1, waiting_requests=0))
    picks = Counter(rig.ask(text(i, blocks=10), draw=i) for i in range(8))
    assert max(picks.values()) <= 5
    for name in ("a", "b"):
        foreign = 1 if name == "b" else 0
        rig.step(LoadReported(rig.live_id(name), running_requests=picks[name] + foreign, waiting_requests=0))
    workers = {w.name: w.targets[0] for w in rig.router.status(rig.now).workers}
    assert {name: t.foreign_requests for name, t in workers.items()} == {"a": 0, "b": 1}


@pytest.mark.covers("S04", "RT-24")
@pytest.mark.parametrize("scorer", ["weights", "predict"])
def test_warm_sessions_return_to_their_holders_while_an_unrelated_worker_is_saturated(scorer):
    rig = Rig(scorer=scorer)
    rig.join("a", "b", "c", "d")
    sessions = [(name, text(i * 10 + k, blocks=60)) for i, name in enumerate("abc") for k in range(7)]
    for name, history in sessions:
        rig.hold(name, history)
    for _ in range(30):
        book_prefill(rig, "d", 4_000)
    homes = 0
    for k, (name, history) in enumerate(sessions):
        receipt = rig.serve(_grown(history, k))
        homes += receipt.chosen_worker == name
        assert receipt.chosen_worker == name or receipt.route_reason is RouteReason.CACHE_SPILL
    assert homes >= 0.95 * len(sessions)


def _grown(history, k):
    return np.concatenate([history, text(900 + k, blocks=2)])


@pytest.mark.covers("S06")
@pytest.mark.parametrize("sessions", [16, 40])
def test_one_shared_system_prompt_does_not_make_one_hot_worker(sessions):
    rig = Rig()
    rig.join("a", "b", "c", "d")
    counts: Counter = Counter()
    home: dict[str, str] = {}
    returns = []
    for session, worker in VirtualFleet(rig, "abcd").run(growing_sessions(sessions, turns=8), in_flight=8):
        counts[worker] += 1
        if session in home:
            returns.append(home[session] == worker)
        home[session] = worker
    assert max(counts.values()) <= 1.5 * sum(counts.values()) / 4, counts
    assert sum(returns) >= 0.8 * len(returns), counts


def growing_sessions(sessions, *, turns):
    """Turn by turn over all sessions: one system prompt for all, then each session's own growing history."""
    history = {f"s{i}": text(0, blocks=40) for i in range(sessions)}
    for turn in range(turns):
        for i, session in enumerate(history):
            history[session] = np.concatenate([history[session], text(1_000 + i * 50 + turn, blocks=12)])
            yield session, history[session]


@pytest.mark.covers("RT-24")
def test_an_overloaded_holder_spills_and_the_receipt_names_it():
    rig = Rig()
    rig.join("a", "b")
    prompt = text(1, blocks=20)
    rig.hold("a", prompt)
    for _ in range(10):
        book_prefill(rig, "a", 4_000)
    before = rig.router.status(rig.now).spills
    receipt = rig.serve(prompt)
    assert (receipt.chosen_worker, receipt.spilled_from) == ("b", "a")
    assert rig.router.status(rig.now).spills == before + 1


@pytest.mark.covers("RT-30")
def test_the_policy_can_be_switched_live():
    rig = Rig()
    rig.join("a", "b")
    rig.hold("a", text(1, 2, 3))
    assert rig.serve(text(1, 2, 3)).policy == "cache_load"
    rig.arrive(text(1, 2, 3), request_id="under way")
    rig.step(PolicyChanged("round_robin"))
    receipts = [rig.serve(text(1, 2, 3)) for _ in range(4)]
    assert rig.finish("under way").policy == "cache_load", "decided before the switch"
    assert {r.policy for r in receipts} == {"round_robin"} == {str(r.route_reason) for r in receipts}
    assert Counter(r.chosen_worker for r in receipts) == {"a": 2, "b": 2}


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    assert POLICIES == ("cache_load", "least_load", "random", "round_robin", "sticky", "sticky_load")
    with pytest.raises(UnknownName, match="did you mean `cache_load`"):
        make_policy("cache_lod", "predict", Weights(), Spill())
    with pytest.raises(UnknownName, match="unknown scorer `wieghts`"):
        make_policy("cache_load", "wieghts", Weights(), Spill())


def test_a_burst_with_one_new_prefix_stays_together():
    rig = Rig()
    rig.join("a", "b")
    prefix = text(1, blocks=125)
    picks = [rig.ask(np.concatenate([prefix, text(10 + i)]), draw=i) for i in range(8)]
    assert len(set(picks)) == 1, "followers wait for the leader's prefill instead of repeating it"
    receipt = rig.finish("r2", cached=125 * SIZE)
    assert receipt.matched_tiers_at_route["gpu"] == 0 and receipt.matched_tiers_at_route["in_flight"] >= 110 * SIZE
