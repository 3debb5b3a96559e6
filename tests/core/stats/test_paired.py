from __future__ import annotations

import numpy as np
import pytest
from tests.simulated_fleet import pairs

from kvrelay.core.stats.paired import Call, Pair, compare, mean_effect

PLANTED_SEEDS = range(100, 110)
EQUAL_SEEDS = range(200, 220)


@pytest.mark.covers("BM-27")
def test_a_planted_arm_that_is_ten_per_cent_slower_is_found_in_nine_of_ten_runs() -> None:
    effects = {seed: mean_effect(pairs(seed, slower=1.1), np.random.default_rng(seed)) for seed in PLANTED_SEEDS}
    for seed, effect in effects.items():
        print(f"seed {seed}: {effect.call}, ratio {effect.ratio}, {effect.interval}")

    assert sum(effect.call is Call.HIGHER for effect in effects.values()) >= 9
    assert not any(effect.call is Call.LOWER for effect in effects.values())


@pytest.mark.covers("BM-27")
def test_two_equal_arms_are_called_different_in_at_most_one_of_twenty_runs() -> None:
    effects = {seed: mean_effect(pairs(seed, slower=1.0), np.random.default_rng(seed)) for seed in EQUAL_SEEDS}
    for seed, effect in effects.items():
        print(f"seed {seed}: {effect.call}, ratio {effect.ratio}, {effect.interval}")

    assert sum(effect.sure for effect in effects.values()) <= 1


def constant(ratio: float, *, sessions: int = 8, repeats: int = 3, bucket: str = "a") -> list[Pair]:
    return [
        Pair(repeat, f"s{session}", bucket, 100.0 + session, (100.0 + session) * ratio)
        for repeat in range(repeats)
        for session in range(sessions)
    ]


def test_a_constant_ratio_has_an_interval_of_no_width() -> None:
    found = compare([*constant(0.8), *constant(1.25, bucket="b")], np.random.default_rng(1))

    assert list(found.buckets) == ["a", "b"]
    assert found.buckets["a"].ratio == pytest.approx(0.8)
    assert found.buckets["a"].call is Call.LOWER and found.buckets["b"].call is Call.HIGHER
    interval = found.buckets["a"].interval
    assert interval is not None and (interval.low, interval.high) == pytest.approx((0.8, 0.8))
    assert found.overall.pairs == 48 and found.overall.sessions == 8


def test_one_repeat_of_three_is_no_difference() -> None:
    two_of_three = [
        Pair(pair.repeat, pair.session_id, pair.bucket, pair.baseline, pair.baseline * (1.01 if pair.repeat else 0.2))
        for pair in constant(1.0)
    ]

    assert mean_effect(two_of_three, np.random.default_rng(1)).call is Call.NOT_TOLD_APART


def test_few_sessions_or_repeats_are_called_too_few() -> None:
    found = compare(constant(0.5, sessions=5), np.random.default_rng(1))

    assert found.overall.call is Call.TOO_FEW and found.overall.interval is None
    assert found.overall.ratio == pytest.approx(0.5)
    assert mean_effect(constant(0.5, repeats=2), np.random.default_rng(1)).call is Call.TOO_FEW
    assert compare([], np.random.default_rng(1)).overall.ratio is None


def test_the_p95_of_each_arm_is_compared_too() -> None:
    slow_tail = [
        Pair(pair.repeat, pair.session_id, "a", 100.0, 900.0 if pair.session_id == "s1" else 90.0)
        for pair in constant(1.0)
    ]

    assert compare(slow_tail, np.random.default_rng(1)).p95_ratio.ratio == pytest.approx(9.0)
