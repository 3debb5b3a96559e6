"""Retries are bounded per request and over the fleet."""

from __future__ import annotations

import pytest

from kvrelay.core.model.units import Fault
from kvrelay.core.routing.retry import Retry


def allows(retry, attempts_made=1, fault=Fault.RESET, first_byte=False):
    return retry.allows(attempts_made=attempts_made, fault=fault, first_byte_relayed=first_byte)


@pytest.mark.covers("DR-02")
def test_no_more_attempts_than_configured():
    retry = Retry(attempts=3, budget_ratio=0.2)
    assert [allows(retry, made) for made in (1, 2, 3)] == [True, True, False]


@pytest.mark.covers("S27")
def test_never_after_the_first_byte():
    assert not allows(Retry(attempts=3, budget_ratio=0.2), first_byte=True)


def test_a_request_that_used_up_its_time_is_not_sent_again():
    assert not allows(Retry(attempts=3, budget_ratio=0.2), fault=Fault.TOTAL_TIMEOUT)


def test_a_failing_fleet_is_not_stormed():
    retry, retried = Retry(attempts=3, budget_ratio=0.1), 0
    for _ in range(1_000):
        retry.first_attempt()
        if allows(retry):
            retry.spend()
            retried += 1
    assert retried == pytest.approx(1_000 * 0.1 + 10, abs=2)
