"""Retries are bounded per request and over the fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.model.units import Fault
from kvrelay.core.routing.retry import Retry


def hindrance(retry, attempts_made=1, fault=Fault.RESET, now=0.0, **more):
    return retry.hindrance(now, attempts_made=attempts_made, fault=fault, **more)


@pytest.mark.covers("DR-02")
def test_no_more_attempts_than_configured():
    retry = Retry(attempts=3, budget_ratio=0.2)
    assert [hindrance(retry, made) for made in (1, 2, 3)] == [None, None, "attempts_used_up"]


def test_a_request_that_used_up_its_time_is_not_sent_again():
    retry = Retry(attempts=3, budget_ratio=0.2)
    for relayed in (False, True):
        assert hindrance(retry, fault=Fault.TOTAL_TIMEOUT, relayed=relayed) == "time_over"
    assert hindrance(retry, fault=Fault.IDLE_TIMEOUT) == "time_over"
    assert hindrance(retry, fault=Fault.IDLE_TIMEOUT, relayed=True) is None, "a stream that fell silent can go on"


@pytest.mark.covers("DR-02")
def test_a_failing_fleet_is_not_stormed():
    retry, retried = Retry(attempts=3, budget_ratio=0.1), 0
    for _ in range(1_000):
        retry.first_attempt()
        if hindrance(retry) is None:
            retry.spend()
            retried += 1
    assert retried == pytest.approx(1_000 * 0.1 + 100, abs=2)
    assert hindrance(retry) == "budget_spent"
    assert hindrance(retry, free=True) is None, "what burdens nobody is not charged"


def test_a_spent_budget_comes_back_with_time_but_not_beyond_its_beginning():
    retry = Retry(attempts=3, budget_ratio=0.1)
    for _ in range(100):
        retry.spend()
    assert hindrance(retry, now=0.5) == "budget_spent"
    assert hindrance(retry, now=1.0) is None
    taken = 0
    while hindrance(retry, now=1_000.0) is None:
        retry.spend()
        taken += 1
    assert taken == 100


def test_a_ratio_of_nothing_retries_nothing():
    retry = Retry(attempts=3, budget_ratio=0.0)
    retry.first_attempt()
    assert hindrance(retry, now=100.0) == "budget_spent" and hindrance(retry, free=True) is None
    changed = Retry(attempts=3, budget_ratio=0.2)
    changed.change(attempts=3, budget_ratio=0.0)
    assert hindrance(changed, now=100.0) == "budget_spent"


@pytest.mark.covers("DR-02")
@given(
    ratio=st.floats(0.01, 2.0),
    gaps_s=st.lists(st.floats(0.0, 0.2), min_size=1, max_size=400),
    calm=st.integers(0, 2_000),
)
def test_in_any_stretch_of_time_retries_are_bounded_by_the_ratio_and_a_constant(ratio, gaps_s, calm):
    retry, now, retried = Retry(attempts=10**6, budget_ratio=ratio), 0.0, 0
    for _ in range(calm):
        retry.first_attempt()
    for gap_s in gaps_s:
        now += gap_s
        retry.first_attempt()
        while hindrance(retry, now=now) is None:
            retry.spend()
            retried += 1
    assert retried <= ratio * len(gaps_s) + 100 + now
