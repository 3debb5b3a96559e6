from __future__ import annotations

import pytest

from kvrelay.lab.arms.order import OrderRefused, arms_in_order
from kvrelay.lab.arms.settings import Order, Reset


@pytest.mark.covers("BM-23")
def test_abba_without_a_reset_is_refused() -> None:
    with pytest.raises(OrderRefused, match="balances drift, not caches"):
        arms_in_order(("a", "b"), 2, order=Order.ABBA, reset=Reset.NONE)


@pytest.mark.parametrize("reset", [Reset.FRESH_PROCESSES, Reset.PREFIX_CACHE, Reset.CACHE_SALT])
def test_abba_with_a_reset_turns_every_second_repeat(reset: Reset) -> None:
    arms = arms_in_order(("a", "b"), 2, order=Order.ABBA, reset=reset)

    assert [arm.name for arm in arms] == ["a-0", "b-0", "b-1", "a-1"]
