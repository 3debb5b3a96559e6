"""The four gates: each lost token at exactly one of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.receipts.attribution import attribute
from kvrelay.core.receipts.receipt import GateLoss


def losses(eligible, best, fast, actual, lower=0):
    return attribute(
        eligible_tokens=eligible,
        best_known_tokens=best,
        claimed_fast_tokens=fast,
        claimed_lower_tokens=lower,
        actual_tokens=actual,
    )


@pytest.mark.covers("RT-01")
@pytest.mark.parametrize(
    ("case", "given_", "expected"),
    [
        ("nobody held it", (100, 0, 0, 0), GateLoss(prefix=100, route=0, residency=0, transfer=0)),
        ("all hit", (100, 100, 100, 100), GateLoss(prefix=0, route=0, residency=0, transfer=0)),
        ("another worker held more", (100, 80, 20, 20), GateLoss(prefix=20, route=60, residency=0, transfer=0)),
        ("evicted meanwhile", (100, 80, 80, 76), GateLoss(prefix=20, route=0, residency=4, transfer=0)),
        ("in a lower tier and not loaded", (100, 80, 50, 50, 30), GateLoss(20, 0, 0, 30)),
        ("lower tier lost and part evicted", (100, 80, 50, 40, 30), GateLoss(20, 0, 10, 30)),
        ("hit more than claimed", (100, 30, 30, 60), GateLoss(prefix=40, route=0, residency=0, transfer=0)),
        ("hit more than eligible", (96, 96, 96, 100), GateLoss(prefix=0, route=0, residency=0, transfer=0)),
    ],
)
def test_cases(case, given_, expected):
    assert losses(*given_) == expected, case


tokens = st.integers(0, 200)


@pytest.mark.covers("RT-01")
@given(tokens, tokens, tokens, tokens, tokens)
def test_losses_and_hits_always_add_up(eligible, best, fast, actual, lower):
    loss = losses(eligible, best, fast, actual, lower)
    assert loss.total + min(actual, eligible) == eligible
    assert min(loss.prefix, loss.route, loss.residency, loss.transfer) >= 0
