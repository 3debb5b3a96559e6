"""Hit curves: how many tokens an LRU cache of every size would hit, and where more of it stops paying."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.model.arrays import Ints


class HitCurve(Struct, frozen=True, eq=False):
    """`distances` ascending, one per reused block; `hit_tokens[i]` are hit by a cache of `distances[i]` blocks.

    `scale` is 1 for an exact curve; a sampled one has sampled distances and counts in units of `scale`.
    """

    block_size_tokens: int
    input_tokens: int
    distinct_blocks: int
    distances: Ints
    hit_tokens: Ints
    scale: float = 1.0
    adjustment_tokens: float = 0.0  # what sampling missed or saw too often, put to the shortest distances

    def hits_at(self, capacity_blocks: float) -> float:
        """Tokens hit by `capacity_blocks` of LRU."""
        found = int(np.searchsorted(self.distances, capacity_blocks / self.scale, side="right"))
        if found == 0:
            return 0.0
        return max(0.0, float(self.hit_tokens[found - 1]) * self.scale + self.adjustment_tokens)

    def ratio_at(self, capacity_blocks: float) -> float:
        return self.hits_at(capacity_blocks) / self.input_tokens if self.input_tokens else 0.0

    @property
    def most_hits(self) -> float:
        """What the largest cache would hit: nothing is ever evicted."""
        return self.hits_at(float("inf"))

    @property
    def largest_useful_blocks(self) -> int:
        """Beyond this, capacity changes nothing on this trace."""
        return int(self.distances[-1] * self.scale) if len(self.distances) else 0


def make_curve(
    distances: Ints,
    tokens: Ints,
    *,
    block_size_tokens: int,
    input_tokens: int,
    distinct_blocks: int,
    scale: float = 1.0,
    adjustment_tokens: float = 0.0,
) -> HitCurve:
    """From the distance (0: first use) and the tokens of every block, in any order."""
    reused = distances > 0
    order = np.argsort(distances[reused], kind="stable")
    ordered = distances[reused][order]
    summed = np.cumsum(tokens[reused][order])
    last_of_each = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) if len(ordered) else order
    return HitCurve(
        block_size_tokens,
        input_tokens,
        distinct_blocks,
        ordered[last_of_each],
        summed[last_of_each],
        scale,
        adjustment_tokens,
    )


class Knee(Struct, frozen=True):
    """Where the curve bends.

    The rule: of all capacities, the one at which the curve lies farthest above the straight line from nothing to the
    largest useful capacity, both axes taken from 0 to 1. Up to there capacity brings more than on average, from there
    on less.
    """

    capacity_blocks: int
    hit_tokens: float
    above_line: float  # 0: the curve is the line and has no knee
    share_of_most: float  # of the hits that no eviction at all would give


def knee(curve: HitCurve) -> Knee | None:
    """None for a trace without any reuse."""
    if not len(curve.distances) or curve.most_hits <= 0:
        return None
    capacities = curve.distances / curve.distances[-1]
    hits = curve.hit_tokens / curve.hit_tokens[-1]
    best = int(np.argmax(hits - capacities))
    blocks = round(float(curve.distances[best]) * curve.scale)
    hit_tokens = curve.hits_at(float(curve.distances[best]) * curve.scale)
    return Knee(blocks, hit_tokens, float(hits[best] - capacities[best]), hit_tokens / curve.most_hits)


class Step(Struct, frozen=True):
    """One row of a sizing table. `gain_tokens_per_gb`: further hit tokens per further GB, since the row before."""

    capacity_blocks: int
    capacity_bytes: float
    hit_tokens: float
    hit_ratio: float
    gain_tokens_per_gb: float | None


def table(curve: HitCurve, capacities_blocks: tuple[int, ...], *, bytes_per_token: float) -> tuple[Step, ...]:
    """Rows in order of capacity, with the marginal gain between them. A GB is 1e9 bytes."""
    rows: list[Step] = []
    for blocks in sorted(dict.fromkeys(capacities_blocks)):
        capacity_bytes = blocks * curve.block_size_tokens * bytes_per_token
        hits = curve.hits_at(blocks)
        before_bytes, before_hits = (rows[-1].capacity_bytes, rows[-1].hit_tokens) if rows else (0.0, 0.0)
        added_gb = (capacity_bytes - before_bytes) / 1e9
        gain = (hits - before_hits) / added_gb if added_gb > 0 else None
        rows.append(Step(blocks, capacity_bytes, hits, curve.ratio_at(blocks), gain))
    return tuple(rows)


class TierHits(Struct, frozen=True):
    """What one tier of a hierarchy serves."""

    tier: str
    capacity_blocks: int
    hit_tokens: float
    share_of_hits: float


def tier_hits(curve: HitCurve, tiers: tuple[tuple[str, int], ...]) -> tuple[TierHits, ...]:
    """Nearest tier first. What a tier evicts goes down to the next, and a hit brings it up again: together they are one
    LRU list, cut at the tiers' capacities, so tier k serves the distances between the sums of capacities before and
    after it (exact for exclusive tiers; inclusive ones hold a block twice and serve less)."""
    rows: list[TierHits] = []
    before, served = 0, 0.0
    total = curve.hits_at(sum(blocks for _, blocks in tiers))
    for name, blocks in tiers:
        hits = curve.hits_at(before + blocks) - served
        rows.append(TierHits(name, blocks, hits, hits / total if total else 0.0))
        before, served = before + blocks, served + hits
    return tuple(rows)


def reuse_histogram(curve: HitCurve) -> tuple[tuple[int, float], ...]:
    """Reused tokens by stack distance, in classes that double: (largest distance in the class, tokens)."""
    classes: list[tuple[int, float]] = []
    upper, before = 1, 0.0
    while before < curve.most_hits:
        hits = curve.hits_at(upper)
        classes.append((upper, hits - before))
        upper, before = upper * 2, max(before, hits)
    return tuple(classes)
