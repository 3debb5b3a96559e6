"""Stack distances, the curves made of them, and samples of both, against simulated caches."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.cachesim.eviction.lru import Lru
from kvrelay.core.cachesim.prefix import run_prefix_caches
from kvrelay.core.cachesim.prefix_trace import PrefixRequest, PrefixTrace
from kvrelay.core.sizing.curve import knee, make_curve, reuse_histogram, table, tier_hits
from kvrelay.core.sizing.stack_distance import distances_into, tree_size
from kvrelay.lab.sizing import distances
from kvrelay.lab.sizing.distances import exact_curve, sampled_curve

SIZE = 16


def made_trace(seed: int, requests: int = 300, *, texts: int = 40) -> PrefixTrace:
    """Prefixes of texts, the first ones used most, with partial last blocks."""
    chance = random.Random(seed)
    made = []
    for i in range(requests):
        base = 20 * min(int(chance.paretovariate(0.6)) - 1, texts - 1)
        blocks = tuple(range(base, base + chance.randrange(1, 21)))
        made.append(PrefixRequest(float(i), "s", blocks, len(blocks) * SIZE - chance.randrange(SIZE)))
    return PrefixTrace(SIZE, tuple(made), 20 * texts)


def plain_distances(chains: list[list[int]], distinct: int) -> list[int]:
    blocks = [block for chain in chains for block in chain]
    starts = [0]
    for chain in chains:
        starts.append(starts[-1] + len(chain))
    size = tree_size(distinct, max(map(len, chains))) + 1
    out = [0] * len(blocks)
    distances_into(blocks, starts, out, [0] * distinct, [0] * size, [0] * size)
    return out


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), min_size=1, max_size=120))
def test_distances_are_places_in_the_order_of_last_use(chains):
    order: list[int] = []  # used last stands first
    expected = []
    for chain in chains:
        expected += [order.index(block) + 1 if block in order else 0 for block in chain]
        for block in reversed(chain):
            if block in order:
                order.remove(block)
            order.insert(0, block)
    assert plain_distances(chains, 31) == expected


@pytest.mark.covers("TU-04", "TU-05")
@pytest.mark.parametrize("seed", range(3))
def test_the_curve_has_the_hits_of_a_simulated_cache_of_every_size(seed):
    trace = made_trace(seed)
    curve = exact_curve(trace)
    for capacity in (1, 7, 20, 63, 150, 400, 10_000):
        simulated = run_prefix_caches(trace, lambda on_gone: Lru(capacity, on_gone))  # noqa: B023
        assert curve.hits_at(capacity) == simulated.hit.tokens


def test_plain_python_is_right_too(monkeypatch):
    compiled = exact_curve(made_trace(1))
    monkeypatch.setattr(distances, "compiled", lambda: False)
    plain = exact_curve(made_trace(1))
    assert (plain.distances == compiled.distances).all() and (plain.hit_tokens == compiled.hit_tokens).all()
    assert distances.slow_note(10_000) is None
    assert "kvrelay[sim]" in distances.slow_note(10_000_000)


def test_a_sample_is_near_the_whole():
    rng = np.random.default_rng(5)
    keys = (rng.zipf(1.2, 60_000) % 20_000).tolist()
    requests = tuple(PrefixRequest(float(i), "s", (key,), SIZE) for i, key in enumerate(keys))
    trace = PrefixTrace(SIZE, requests, 20_000)
    exact, sample = exact_curve(trace), sampled_curve(trace, rate=0.2)
    for capacity in (50, 200, 1000, 5000):
        assert abs(exact.ratio_at(capacity) - sample.ratio_at(capacity)) < 0.03
    whole = sampled_curve(trace, rate=1.0)
    assert (whole.distances == exact.distances).all() and whole.adjustment_tokens == 0
    assert sample.distances.size < exact.distances.size


@pytest.mark.covers("TU-02")
def test_tiers_share_the_hits_of_one_cache_of_their_size():
    curve = exact_curve(made_trace(2))
    near, far = tier_hits(curve, (("gpu", 50), ("cpu", 100)))
    assert near.hit_tokens == curve.hits_at(50)
    assert near.hit_tokens + far.hit_tokens == curve.hits_at(150)
    assert near.share_of_hits + far.share_of_hits == pytest.approx(1)


@pytest.mark.covers("TU-04")
def test_the_knee_is_where_capacity_begins_to_bring_less_than_on_average():
    distances_of = np.array([0] * 10 + [10] * 90 + [1000] * 10)
    curve = make_curve(distances_of, np.full(110, 16), block_size_tokens=16, input_tokens=110 * 16, distinct_blocks=10)
    bend = knee(curve)
    assert (bend.capacity_blocks, bend.hit_tokens) == (10, 90 * 16)
    assert bend.share_of_most == pytest.approx(0.9)
    first, second, third = table(curve, (10, 1000, 2000), bytes_per_token=1e6)
    assert first.gain_tokens_per_gb == pytest.approx(90 * 16 / 0.16)
    assert second.gain_tokens_per_gb < first.gain_tokens_per_gb / 100
    assert third.gain_tokens_per_gb == 0


def test_a_trace_without_reuse_has_no_knee():
    requests = tuple(PrefixRequest(float(i), "s", (i,), SIZE) for i in range(5))
    curve = exact_curve(PrefixTrace(SIZE, requests, 5))
    assert knee(curve) is None and curve.most_hits == 0 and reuse_histogram(curve) == ()


@pytest.mark.covers("TU-05")
def test_the_histogram_of_reuse_distances_adds_up_to_all_reuse():
    curve = exact_curve(made_trace(3))
    classes = reuse_histogram(curve)
    assert sum(tokens for _, tokens in classes) == curve.most_hits
    assert classes[-1][0] >= curve.largest_useful_blocks
