"""A worker's standing: probes, refused connections, failures in serving, trials."""

from __future__ import annotations

import pytest

from kvrelay.core.model.units import Fault
from kvrelay.core.routing.health import SILENCE_S, Change, Health, Standing


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
            health.dispatched(now, "t")
            assert len(trials) < 3 or not health.routable(now), "one trial at a time"
            health.failed(now, "t", Fault.SERVER_ERROR)
        health.probed(True)
        now += 0.5
    assert trials == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5]


def test_a_good_trial_ends_the_suspension(health):
    for _ in range(2):
        health.failed(0.0, "r", Fault.RESET)
    assert not health.routable(0.5) and health.routable(1.0)
    health.dispatched(1.0, "t")
    assert not health.routable(1.0)
    assert health.served(1.0, "t") is Change.RECOVERED
    assert health.routable(1.0) and health.steady


def test_a_trial_whose_client_left_frees_the_place_after_another_wait(health):
    """Else a stuck worker would get one impatient client after the other."""
    for _ in range(2):
        health.failed(0.0, "r", Fault.RESET)
    health.dispatched(1.0, "t")
    assert health.abandoned(1.5, "t", sent_at=1.0) is Change.NONE
    assert not health.routable(2.4) and health.routable(2.5) and not health.steady


def test_a_trial_that_shows_nothing_for_long_does_not_keep_others_out_for_ever(health):
    for _ in range(2):
        health.failed(0.0, "r", Fault.FIRST_BYTE_TIMEOUT)
    health.dispatched(1.0, "lost")
    assert not health.routable(30.9) and health.routable(31.0)
    health.dispatched(31.0, "next")
    assert not health.routable(31.0)
    assert health.served(32.0, "next") is Change.RECOVERED and health.routable(32.0)


def test_a_trial_that_computes_lets_the_next_one_in_and_one_that_ends_well_ends_the_matter(health):
    for _ in range(2):
        health.failed(0.0, "r", Fault.RESET)
    health.dispatched(1.0, "t1")
    assert not health.routable(5.0)
    health.showed_life(5.0, "t1")
    assert health.routable(5.0) and not health.steady
    health.dispatched(5.0, "t2")
    assert not health.routable(5.0), "one that has shown nothing at a time"
    health.served(6.0, "t1")
    assert health.steady


def test_a_worker_that_breaks_every_stream_after_its_first_token_relapses(health):
    for _ in range(2):
        health.failed(0.0, "r", Fault.RESET)
    waits, now = [], 0.0
    for _ in range(4):
        until = next(now + step / 4 for step in range(200) if health.routable(now + step / 4))
        waits.append(until - now)
        now = until
        health.dispatched(now, "t")
        health.showed_life(now, "t")
        health.failed(now, "t", Fault.RESET)
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_a_request_sent_to_a_suspended_worker_for_want_of_another_is_news(health):
    for _ in range(2):
        health.failed(0.0, "r", Fault.SERVER_ERROR)
    health.dispatched(1.0, "resort")
    assert health.served(0.5, "resort") is Change.RECOVERED and health.routable(0.5)


@pytest.mark.covers("S26")
def test_a_stuck_engine_is_found_out_whatever_its_probes_say(health):
    """Requests time out at the first byte, or their impatient clients leave; trials are as rare as for any failure."""
    sent, now = 0, 0.0
    while now < 300.0:
        health.probed(True)
        if health.routable(now):
            name, sent = f"r{sent}", sent + 1
            health.dispatched(now, name)
            patience_s = (3.0, 20.0)[sent % 2]  # every other client leaves after 3 s, the rest after 20 s
            now += patience_s
            health.abandoned(now, name, sent_at=now - patience_s)
        else:
            now += 0.25
    assert sent < 25, "after two long silences a trial every 30 s or so"
    assert health.relapses >= 3


def test_clients_that_leave_a_worker_that_computes_say_nothing_about_it(health):
    for i in range(20):
        health.showed_life(i * 20.0 + 1.0)
        health.dispatched(i * 20.0, f"r{i}")
        assert health.abandoned(i * 20.0 + SILENCE_S + 5.0, f"r{i}", sent_at=i * 20.0) is Change.NONE
    assert health.steady


def test_what_speaks_against_a_worker_is_graded(health):
    assert health.standing(0.0) is Standing.ROUTABLE
    health.failed(0.0, "r", Fault.CONNECT)
    assert health.standing(0.0) is Standing.UNREACHED, "one refused connection; a probe will tell"
    health.probed(False)
    assert health.standing(0.0) is Standing.UNREACHED
    health.probed(False)
    assert health.standing(0.0) is Standing.DEAD
    health.failed(0.0, "late", Fault.CONNECT)
    assert health.standing(0.0) is Standing.DEAD
    for _ in range(2):
        health.probed(True)
    for _ in range(2):
        health.failed(0.0, "r", Fault.RESET)
    assert health.standing(0.0) is Standing.SUSPENDED


@pytest.mark.covers("S26")
def test_requests_that_break_together_are_one_relapse(health):
    for i in range(60):
        health.failed(0.0, f"r{i}", Fault.RESET)
    assert health.routable(1.0)
    health.dispatched(1.0, "t")
    for i in range(60):
        health.failed(1.1, f"late{i}", Fault.RESET)
    health.failed(1.2, "t", Fault.RESET)
    assert not health.routable(3.1) and health.routable(3.2)


@pytest.mark.covers("S26")
def test_a_stream_from_better_days_that_ends_well_does_not_end_a_suspension(health):
    for i in range(2):
        health.failed(0.0, f"r{i}", Fault.SERVER_ERROR)
    health.served(0.5, "old")
    assert not health.routable(0.9)
    health.dispatched(1.0, "t")
    health.served(1.0, "t")
    assert health.steady
