from __future__ import annotations

import numpy as np
import pytest

from kvrelay.core.stats.bootstrap import (
    MIN_UNITS,
    draw_weights,
    drawn_means,
    drawn_quantiles,
    percentile_interval,
    student_quantile,
)


@pytest.mark.parametrize(
    ("share", "degrees", "expected"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.3027),
        (0.975, 3, 3.1824),
        (0.975, 5, 2.5706),
        (0.975, 23, 2.0687),
        (0.95, 10, 1.8125),
        (0.995, 30, 2.75),
    ],
)
def test_student_quantiles_are_those_of_the_tables(share: float, degrees: int, expected: float) -> None:
    assert student_quantile(share, degrees) == pytest.approx(expected, rel=2e-3)


def test_drawn_means_and_quantiles_equal_a_naive_resampling() -> None:
    rng = np.random.default_rng(11)
    values = rng.normal(10, 3, size=40)
    repeat_of, session_of = rng.integers(0, 3, size=40), rng.integers(0, 7, size=40)
    sums, counts = np.zeros((3, 7)), np.zeros((3, 7))
    np.add.at(sums, (repeat_of, session_of), values)
    np.add.at(counts, (repeat_of, session_of), 1)
    weights = draw_weights(rng, repeats=3, sessions=7, draws=25)

    means = drawn_means(weights, sums, counts)
    quantiles = drawn_quantiles(weights, values, repeat_of, session_of, 0.95)

    for draw in range(25):
        times = weights.repeats[draw, repeat_of] * weights.sessions[draw, session_of]
        repeated = np.sort(np.repeat(values, times))
        assert means[draw] == pytest.approx(repeated.mean())
        assert quantiles[draw] == repeated[int(np.ceil(0.95 * repeated.size)) - 1]


def test_few_units_have_no_interval_and_few_are_wider_than_many() -> None:
    drawn = np.random.default_rng(3).normal(size=4000)

    assert percentile_interval(drawn, units=MIN_UNITS - 1) is None
    assert percentile_interval(drawn[:0], units=100) is None
    few, many = percentile_interval(drawn, units=MIN_UNITS), percentile_interval(drawn, units=500)
    assert few is not None and many is not None
    assert few.low < many.low < -1.8 and few.high > many.high > 1.8


def test_same_seed_same_interval() -> None:
    drawn = [draw_weights(np.random.default_rng(5), repeats=3, sessions=9, draws=10).sessions for _ in range(2)]
    assert (drawn[0] == drawn[1]).all()
