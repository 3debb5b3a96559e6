"""Percentiles that never travel without their count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct


class Distribution(Struct, frozen=True):
    """Nearest-rank percentiles: each is a value that was really measured. All null when there was no sample."""

    count: int
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    mean: float | None = None
    max: float | None = None


def distribution(values: Sequence[float]) -> Distribution:
    if not values:
        return Distribution(0)
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    p50, p95, p99 = (round(_nearest_rank(ordered, percent), 3) for percent in (50, 95, 99))
    return Distribution(ordered.size, p50, p95, p99, round(float(ordered.mean()), 3), round(float(ordered[-1]), 3))


def _nearest_rank(ordered: np.ndarray, percent: int) -> float:
    rank = -(-ordered.size * percent // 100)
    return float(ordered[max(1, rank) - 1])
