"""Which differences between claim and outcome count, when they call for a remedy, and for which one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvrelay.core.index.drift import CheckTail, Drift, DriftBounds, DriftKind, Outcome, Rebuild
from tests.core.index.worlds import keys

OVER, UNDER = DriftKind.OVER_CLAIM, DriftKind.UNDER_CLAIM
CHAIN = keys(range(20))
SIZE = 16


class World:
    """Requests that take a second each; `known` is how deep the index knows the chain when it is asked."""

    def __init__(self, **bounds):
        self.known = 0
        self.drift = Drift(DriftBounds(**{"window_requests": 8, **bounds}), lambda _keys: self.known)
        self.now = 100.0

    def request(self, *, claimed, actual, expected=None, meanwhile=None):
        """Routed, perhaps something happens, finished; judged with the next one."""
        routed_at = self.now
        self.now += 0.5
        if meanwhile is not None:
            meanwhile(self.now)
        self.now += 0.5
        outcome = Outcome(
            routed_at=routed_at,
            finished_at=self.now,
            keys=CHAIN,
            claimed_blocks=claimed,
            expected_blocks=claimed if expected is None else expected,
            actual_blocks=actual,
        )
        return self.drift.finished(self.now, outcome, SIZE)

    def requests(self, count, **same):
        return [self.request(**same) for _ in range(count)]


@pytest.mark.covers("DR-07")
def test_repeated_under_claims_ask_for_the_tail():
    world = World()
    assert world.requests(4, claimed=0, actual=10) == [None, None, None, CheckTail(UNDER, 3, 3 * 10 * SIZE)]
    assert world.drift.drifted == {OVER: 0, UNDER: 3} and world.drift.remedies == 1


@pytest.mark.covers("RC-12")
def test_repeated_over_claims_ask_for_the_tail_and_then_rebuild():
    world = World(backoff_s=5.0)
    assert world.requests(4, claimed=10, actual=2)[-1] == CheckTail(OVER, 3, 3 * 8 * SIZE)
    world.drift.tail_checked(brought_news=False)
    remedies = [remedy for remedy in world.requests(8, claimed=10, actual=2) if remedy is not None]
    assert remedies == [Rebuild(OVER, 5, 5 * 8 * SIZE)]


def test_a_tail_that_brought_news_is_asked_for_again_before_anything_is_forgotten():
    world = World(backoff_s=1.0)
    world.requests(4, claimed=10, actual=2)
    world.drift.tail_checked(brought_news=True)
    assert isinstance(next(r for r in world.requests(8, claimed=10, actual=2) if r), CheckTail)


def test_under_claims_never_lead_to_a_rebuild():
    world = World(backoff_s=1.0, max_backoff_s=1.0)
    for _ in range(5):
        remedies = [remedy for remedy in world.requests(4, claimed=0, actual=10) if remedy is not None]
        world.drift.tail_checked(brought_news=False)
        assert all(isinstance(remedy, CheckTail) for remedy in remedies)
    assert world.drift.remedies >= 4


@pytest.mark.parametrize("claimed, actual, expected", [(5, 5, 5), (5, 4, 5), (5, 6, 5), (2, 9, 10), (2, 9, 8)])
def test_one_block_is_no_drift_nor_is_what_a_running_prefill_or_a_lower_tier_brought(claimed, actual, expected):
    world = World()
    assert world.requests(20, claimed=claimed, actual=actual, expected=expected) == [None] * 20
    assert world.drift.drifted == {OVER: 0, UNDER: 0} and world.drift.calm


def test_what_was_promised_and_not_kept_by_lower_tiers_or_running_prefills_is_no_drift():
    world = World()
    assert world.requests(20, claimed=3, expected=12, actual=3) == [None] * 20
    assert world.drift.drifted[OVER] == 0


def test_an_eviction_between_routing_and_prefill_is_no_drift():
    world = World()
    evict = CHAIN[2:10].tolist()[::-1]
    assert (
        world.requests(20, claimed=10, actual=2, meanwhile=lambda now: world.drift.removed(now, evict)) == [None] * 20
    )
    assert world.drift.drifted[OVER] == 0


def test_an_eviction_of_other_blocks_explains_nothing():
    world = World()
    other = keys([99, 98]).tolist()
    remedies = world.requests(4, claimed=10, actual=2, meanwhile=lambda now: world.drift.removed(now, other))
    assert remedies[-1] == CheckTail(OVER, 3, 3 * 8 * SIZE)


def test_what_was_removed_before_the_request_was_routed_explains_nothing():
    world = World()
    world.drift.removed(world.now - 10, CHAIN.tolist())
    assert world.requests(4, claimed=10, actual=2)[-1] is not None


def test_a_prefill_by_another_request_in_between_is_no_drift():
    world = World()
    world.known = 10  # by the time of judgement its events have come
    assert world.requests(20, claimed=0, actual=10) == [None] * 20
    assert world.drift.drifted[UNDER] == 0


def test_what_was_hit_and_evicted_before_the_judgement_is_no_drift():
    world = World()
    world.known = 4
    gone = CHAIN[4:10].tolist()
    assert world.requests(20, claimed=4, actual=10, meanwhile=lambda now: world.drift.removed(now, gone)) == [None] * 20


def test_nothing_is_said_of_requests_routed_before_the_holder_was_emptied():
    world = World()
    world.requests(3, claimed=10, actual=2)
    world.request(claimed=10, actual=2, meanwhile=world.drift.emptied)
    assert world.request(claimed=0, actual=0) is None
    assert world.drift.drifted[OVER] == 2, "the two that were judged before"


def test_what_happened_too_long_ago_to_remember_is_not_judged():
    world = World()

    def churn(now):
        world.drift.removed(now, range(10_000))
        world.drift.removed(now + 0.1, range(10_000, 20_000))

    assert world.requests(20, claimed=10, actual=2, meanwhile=churn) == [None] * 20


def test_a_few_drifting_tokens_among_many_good_ones_are_left_alone():
    world = World(window_requests=100, min_ratio=0.05)
    for _ in range(10):
        assert world.requests(9, claimed=20, actual=20) == [None] * 9
        assert world.request(claimed=0, actual=2) is None
    assert world.drift.drifted[UNDER] >= 9


def test_remedies_come_at_growing_distances_until_a_whole_window_is_calm():
    world = World(backoff_s=4.0, max_backoff_s=20.0)

    def remedied_at(requests):
        times = []
        for _ in range(requests):
            if world.request(claimed=0, actual=10) is not None:
                times.append(world.now)
        return [later - earlier for earlier, later in pairwise(times)]

    assert remedied_at(80) == [4.0, 8.0, 16.0, 20.0, 20.0]
    world.requests(9, claimed=5, actual=5)
    assert world.drift.calm
    world.now += 20.0
    assert remedied_at(10) == [4.0]
