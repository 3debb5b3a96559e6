"""Sampling for huge traces: SHARDS with a fixed rate (Waldspurger et al., FAST 2015), adjusted (their section 5).

A block is in the sample if a hash of its number says so, so all its uses are or none is. Distances among sampled blocks
are as much too short as the sample is small, which is set right by dividing by the rate. The number of sampled uses
hardly ever is what the rate promises; the difference comes from a few blocks used very often, and is put to the
shortest distances.
"""

from __future__ import annotations

import numpy as np

from kvrelay.core.model.arrays import Ints


def sampled(blocks: Ints, *, rate: float, seed: int = 0) -> np.ndarray:
    """Which entries are in the sample; all of a block's or none. `rate` in (0, 1]."""
    if not 0 < rate <= 1:
        raise ValueError(f"rate is {rate}; legal: above 0, at most 1")
    words = blocks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64((seed * 2 + 1) & (1 << 63) - 1)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    kept: np.ndarray = words < np.uint64(min(rate * 2.0**64, 2.0**64 - 2048))
    return kept


def adjustment_tokens(all_tokens: float, sampled_tokens: float, *, rate: float) -> float:
    """Tokens to add to the curve: those expected in the sample less those that are, in units of the whole trace."""
    return all_tokens - sampled_tokens / rate
