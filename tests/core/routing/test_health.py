"""A worker's standing: probes, refused connections, failures in serving, trials."""

from __future__ import annotations

import pytest

from kvrelay.core.model.units import Fault
from kvrelay.core.routing.health import Change, Health


@pytest.fixture
def health():
    return Health(failures_to_down=2, successes_to_up=2)


def test_probes_need_several_opinions_in_a_row(health):
    assert health.probed(False) is Change.NONE
    assert health.probed(True) is Change.NONE
    assert health.probed(False) is Change.NONE
    assert health.probed(False) is Change.WENT_DOWN and not health.routable(0.0)
    assert health.probed(True) is Change.NONE
    assert health.probed(True) is Change.WENT_UP and health.routable(0.0)


@pytest.mark.parametrize("fault", [Fault.CONNECT, Fault.CONNECT_TIMEOUT])
def test_a_refused_connection_is_enough(health, fault):
    assert health.failed(0.0, "r", fault) is Change.WENT_DOWN


@pytest.mark.covers("S25")
def test_back_pressure_says_nothing_about_health(health):
    for i in range(20):
        assert health.failed(0.0, f"r{i}", Fault.BACK_PRESSURE) is Change.NONE
    assert health.routable(0.0) and health.steady


@pytest.mark.covers("S26")
def test_a_worker_that_fails_requests_is_tried_at_a_falling_rate_whatever_its_probes_say(health):
    trials, now = [], 0.0
    while now < 60.0:
        if health.routable(now):
            trials.append(now)
            health.dispatched("t")
            assert len(trials) < 3 or not health.routable(now), "one trial at a time"
            health.failed(now, "t", Fault.SERVER_ERROR)
        health.probed(True)
        now += 0.5
    assert trials == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5]


def test_a_good_trial_ends_the_suspension(health):
    for _ in range(2):
        health.failed(0.0, "r", Fault.RESET)
    assert not health.routable(0.5) and health.routable(1.0)
    health.dispatched("t")
    assert not health.routable(1.0)
    health.served("t")
    assert health.routable(1.0) and health.steady


def test_a_trial_whose_client_left_frees_the_place(health):
    for _ in range(2):
        health.failed(0.0, "r", Fault.RESET)
    health.dispatched("t")
    health.released("t")
    assert health.routable(1.0) and not health.steady


@pytest.mark.covers("S26")
def test_requests_that_break_together_are_one_relapse(health):
    for i in range(60):
        health.failed(0.0, f"r{i}", Fault.RESET)
    assert health.routable(1.0)
    health.dispatched("t")
    for i in range(60):
        health.failed(1.1, f"late{i}", Fault.RESET)
    health.failed(1.2, "t", Fault.RESET)
    assert not health.routable(3.1) and health.routable(3.2)


@pytest.mark.covers("S26")
def test_a_stream_from_better_days_that_ends_well_does_not_end_a_suspension(health):
    for i in range(2):
        health.failed(0.0, f"r{i}", Fault.SERVER_ERROR)
    health.served("old")
    assert not health.routable(0.9)
    health.dispatched("t")
    health.served("t")
    assert health.steady
