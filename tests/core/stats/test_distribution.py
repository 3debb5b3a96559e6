from __future__ import annotations

import pytest

from kvrelay.core.stats.balance import max_over_mean
from kvrelay.core.stats.distribution import Distribution, distribution


def test_percentiles_are_measured_values_and_carry_their_count() -> None:
    assert distribution([float(n) for n in range(100, 0, -1)]) == Distribution(100, 50.0, 95.0, 99.0, 50.5, 100.0)
    assert distribution([3.0]) == Distribution(1, 3.0, 3.0, 3.0, 3.0, 3.0)


def test_nothing_measured_is_null_and_not_zero() -> None:
    assert distribution([]) == Distribution(0, None, None, None, None, None)


@pytest.mark.covers("RT-25")
@pytest.mark.parametrize(
    ("load", "ratio"),
    [
        ({"a": 5.0, "b": 5.0}, 1.0),
        ({"a": 8.0, "b": 0.0, "c": 0.0, "d": 0.0}, 4.0),
        ({"a": 3.0, "b": 1.0}, 1.5),
        ({"a": 0.0}, None),
        ({}, None),
    ],
)
def test_busiest_over_mean(load: dict[str, float], ratio: float | None) -> None:
    assert max_over_mean(load) == ratio
