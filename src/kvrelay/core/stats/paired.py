"""Two arms, request by request: the same turn of the same session in the same repeat, once under each policy.

What is compared is the ratio candidate / baseline of each pair, on a logarithmic scale, so that twice as slow and twice
as fast weigh the same. The interval is the hull of two: one draws sessions and repeats (`bootstrap`), the other takes
the repeats alone as a sample, by Student's t. The second one is what keeps two equal arms from being called different:
near saturation a machine that is 2 % slower for the length of one arm makes everybody in it wait longer, and no number
of requests averages that away. More repeats do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
from msgspec import Struct

from kvrelay.core.stats.bootstrap import (
    DRAWS,
    LEVEL,
    Interval,
    draw_weights,
    drawn_means,
    drawn_quantiles,
    percentile_interval,
    student_interval,
)


class Call(StrEnum):
    """What a comparison says of the candidate."""

    LOWER = "lower"
    HIGHER = "higher"
    NOT_TOLD_APART = "not_told_apart"
    TOO_FEW = "too_few"


class Pair(Struct, frozen=True):
    """One request under both policies; both values are above 0 and in the same unit."""

    repeat: int
    session_id: str
    bucket: str
    baseline: float
    candidate: float


class PairedEffect(Struct, frozen=True):
    """`ratio` is the geometric mean of candidate / baseline. `repeats` has it for every repeat."""

    pairs: int
    sessions: int
    ratio: float | None
    interval: Interval | None
    repeats: tuple[float, ...]
    call: Call

    @property
    def sure(self) -> bool:
        return self.call in (Call.LOWER, Call.HIGHER)


class Comparison(Struct, frozen=True):
    """Over all pairs, and bucket by bucket.

    Every interval is at the same level: of twenty buckets of equal arms, one may be called different. Whoever asks that
    *all* buckets win needs no correction for their number.
    """

    overall: PairedEffect
    p95_ratio: PairedEffect
    buckets: Mapping[str, PairedEffect]


def compare(pairs: Sequence[Pair], rng: np.random.Generator, *, level: float = LEVEL, draws: int = DRAWS) -> Comparison:
    """Buckets come in the order in which the pairs name them."""
    names = tuple(dict.fromkeys(pair.bucket for pair in pairs))
    return Comparison(
        overall=mean_effect(pairs, rng, level=level, draws=draws),
        p95_ratio=quantile_effect(pairs, rng, share=0.95, level=level, draws=draws),
        buckets={
            name: mean_effect([pair for pair in pairs if pair.bucket == name], rng, level=level, draws=draws)
            for name in names
        },
    )


def mean_effect(
    pairs: Sequence[Pair], rng: np.random.Generator, *, level: float = LEVEL, draws: int = DRAWS
) -> PairedEffect:
    if not pairs:
        return _NOTHING
    repeat_of, session_of = _numbers([pair.repeat for pair in pairs]), _numbers([pair.session_id for pair in pairs])
    logs = np.log([pair.candidate / pair.baseline for pair in pairs])
    shape = (int(repeat_of.max()) + 1, int(session_of.max()) + 1)
    sums, counts = np.zeros(shape), np.zeros(shape)
    np.add.at(sums, (repeat_of, session_of), logs)
    np.add.at(counts, (repeat_of, session_of), 1.0)
    weights = draw_weights(rng, repeats=shape[0], sessions=shape[1], draws=draws)
    drawn = drawn_means(weights, sums, counts)
    repeats = tuple(float(np.exp(logs[repeat_of == number].mean())) for number in range(shape[0]))
    return _effect(len(pairs), shape[1], float(np.exp(logs.mean())), repeats, drawn, level)


def quantile_effect(
    pairs: Sequence[Pair], rng: np.random.Generator, *, share: float, level: float = LEVEL, draws: int = DRAWS
) -> PairedEffect:
    """The ratio of the two arms' quantiles, with whole sessions and repeats drawn for both at once."""
    if not pairs:
        return _NOTHING
    repeat_of, session_of = _numbers([pair.repeat for pair in pairs]), _numbers([pair.session_id for pair in pairs])
    baseline = np.array([pair.baseline for pair in pairs])
    candidate = np.array([pair.candidate for pair in pairs])
    shape = (int(repeat_of.max()) + 1, int(session_of.max()) + 1)
    weights = draw_weights(rng, repeats=shape[0], sessions=shape[1], draws=draws)
    drawn = drawn_quantiles(weights, candidate, repeat_of, session_of, share) / drawn_quantiles(
        weights, baseline, repeat_of, session_of, share
    )
    inside = [repeat_of == number for number in range(shape[0])]
    repeats = tuple(_quantile(candidate[own], share) / _quantile(baseline[own], share) for own in inside)
    ratio = _quantile(candidate, share) / _quantile(baseline, share)
    return _effect(len(pairs), shape[1], ratio, repeats, np.log(drawn), level)


def _effect(
    pairs: int, sessions: int, ratio: float, repeats: tuple[float, ...], drawn_logs: np.ndarray, level: float
) -> PairedEffect:
    interval = _hull(
        percentile_interval(drawn_logs, units=sessions, level=level),
        student_interval(np.log(repeats), level=level),
    )
    return PairedEffect(pairs, sessions, ratio, interval, repeats, _call(interval))


def _call(interval: Interval | None) -> Call:
    if interval is None:
        return Call.TOO_FEW
    if interval.high < 1.0:
        return Call.LOWER
    return Call.HIGHER if interval.low > 1.0 else Call.NOT_TOLD_APART


def _hull(first: Interval | None, second: Interval | None) -> Interval | None:
    """Both or nothing; from logarithms back to ratios."""
    if first is None or second is None:
        return None
    low, high = min(first.low, second.low), max(first.high, second.high)
    return Interval(float(np.exp(low)), float(np.exp(high)), first.level)


def _quantile(values: np.ndarray, share: float) -> float:
    """Nearest rank, as everywhere."""
    return float(np.sort(values)[max(1, int(np.ceil(share * values.size))) - 1])


def _numbers(names: Sequence[object]) -> np.ndarray:
    """0, 1, 2, ... in the order of first sight."""
    seen: dict[object, int] = {}
    return np.array([seen.setdefault(name, len(seen)) for name in names])


_NOTHING = PairedEffect(0, 0, None, None, (), Call.TOO_FEW)
