"""How evenly work was spread: the busiest worker against the mean of all."""

from __future__ import annotations

from collections.abc import Mapping


def max_over_mean(load_by_worker: Mapping[str, float]) -> float | None:
    """1.0 is perfectly even, the number of workers is all on one; None when there was no load at all.

    Workers without work must be in the mapping with 0, or the mean would flatter a policy that leaves some idle.
    """
    total = sum(load_by_worker.values())
    if total <= 0:
        return None
    return round(max(load_by_worker.values()) * len(load_by_worker) / total, 3)
