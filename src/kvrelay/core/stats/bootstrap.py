"""Intervals by resampling, for measurements that are not independent of each other.

Turns of one session share their prefix and wait for each other, and all requests of one repeat share the machine's
mood; treating them as independent finds differences that are not there. So whole sessions and whole repeats are drawn
with replacement at the same time (the *pigeonhole* bootstrap: Owen, "The pigeonhole bootstrap", Annals of Applied
Statistics 1(2), 2007), which is slightly too careful, never too sure.

Percentile intervals of few units are too narrow. They are taken at expanded levels (Hesterberg, "What teachers should
know about the bootstrap", The American Statistician 69(4), 2015): as far out as Student's t with n - 1 degrees is
beyond the normal curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from msgspec import Struct

DRAWS = 2_000
LEVEL = 0.95
MIN_REPEATS = 3
MIN_UNITS = 6  # sessions; an interval of fewer would say more about the method than about the fleet
CELLS = 1 << 20  # of one piece of work: draws x values
_NORMAL = NormalDist()


class Interval(Struct, frozen=True):
    """Two-sided, at `level`."""

    low: float
    high: float
    level: float


class Weights(Struct, frozen=True, eq=False):
    """How often every unit was drawn: one row per draw. Shared by all statistics of one comparison."""

    repeats: np.ndarray  # draws x repeats
    sessions: np.ndarray  # draws x sessions


def draw_weights(rng: np.random.Generator, *, repeats: int, sessions: int, draws: int = DRAWS) -> Weights:
    return Weights(
        rng.multinomial(repeats, np.full(repeats, 1.0 / repeats), size=draws),
        rng.multinomial(sessions, np.full(sessions, 1.0 / sessions), size=draws),
    )


def drawn_means(weights: Weights, sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The mean of every draw; `sums` and `counts` are repeats x sessions. Draws without any value are left out."""
    total = np.einsum("dr,rs,ds->d", weights.repeats, sums, weights.sessions, optimize=True)
    number = np.einsum("dr,rs,ds->d", weights.repeats, counts, weights.sessions, optimize=True)
    means: np.ndarray = total[number > 0] / number[number > 0]
    return means


def drawn_quantiles(
    weights: Weights, values: np.ndarray, repeat_of: np.ndarray, session_of: np.ndarray, share: float
) -> np.ndarray:
    """The nearest-rank quantile of every draw, in which a value counts as often as its repeat and session were drawn.

    Draws without any value are left out.
    """
    order = np.argsort(values, kind="stable")
    ordered, repeat_of, session_of = values[order], repeat_of[order], session_of[order]
    rows = max(1, CELLS // max(1, values.size))
    parts = []
    for start in range(0, len(weights.repeats), rows):
        times = weights.repeats[start : start + rows, repeat_of] * weights.sessions[start : start + rows, session_of]
        running = np.cumsum(times, axis=1)
        total = running[:, -1]
        reached = running >= np.ceil(share * total)[:, None]
        parts.append(ordered[np.argmax(reached, axis=1)][total > 0])
    return np.concatenate(parts)


def percentile_interval(drawn: np.ndarray, *, units: int, level: float = LEVEL) -> Interval | None:
    """None when there are fewer than MIN_UNITS independent units, or no draw had a value."""
    if units < MIN_UNITS or not drawn.size:
        return None
    tail = _expanded_tail((1.0 - level) / 2.0, units)
    low, high = np.quantile(drawn, (tail, 1.0 - tail))
    return Interval(float(low), float(high), level)


def student_interval(values: Sequence[float] | np.ndarray, *, level: float = LEVEL) -> Interval | None:
    """Of the mean of independent values, such as one per repeat; None for fewer than MIN_REPEATS."""
    if len(values) < MIN_REPEATS:
        return None
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    reach = student_quantile((1.0 + level) / 2.0, len(values) - 1) * spread / len(values) ** 0.5
    return Interval(mean - reach, mean + reach, level)


def _expanded_tail(tail: float, units: int) -> float:
    reach = (units / (units - 1)) ** 0.5 * student_quantile(1.0 - tail, units - 1)
    return 1.0 - _NORMAL.cdf(reach)


def student_quantile(share: float, degrees: int) -> float:
    """Of Student's t. Exact for 1 and 2 degrees; then the expansion of Abramowitz and Stegun 26.7.5."""
    if degrees == 1:
        return math.tan(math.pi * (share - 0.5))
    if degrees == 2:
        return (2.0 * share - 1.0) / math.sqrt(2.0 * share * (1.0 - share))
    x = _NORMAL.inv_cdf(share)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92_160,
    )
    return x + float(sum(term / degrees**power for power, term in enumerate(terms, start=1)))
