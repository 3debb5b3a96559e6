"""Small, middle, large: the first size from which more only moves bytes."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.core.sizing.breakeven import Link, Prefill
from kvrelay.core.sizing.curve import HitCurve, make_curve
from kvrelay.core.sizing.sweep import Advice, sweep

BYTES = 1000.0  # of a token; a block of 10 tokens has 10 kB
FAST, SLOW = Link("near", 1e9, 0.0001), Link("far", 1e6, 0.05)
RATE = Prefill("worker", 10_000.0)


def curve(*reuses: tuple[int, int]) -> HitCurve:
    """(stack distance in blocks, blocks re-used at that distance); as many first uses as reuses."""
    distances = [distance for distance, count in reuses for _ in range(count)]
    first = [0] * len(distances)
    return make_curve(
        np.array(first + distances), np.full(2 * len(distances), 10), block_size_tokens=10,
        input_tokens=20 * len(distances), distinct_blocks=len(distances),
    )  # fmt: skip


MOST_IS_NEAR = curve((50, 900), (5000, 5))


def advised(found: HitCurve = MOST_IS_NEAR, link: Link = FAST, near_bytes: float = 0.0, rate: Prefill = RATE) -> Advice:
    sizes = (100 * 10_000.0, 1000 * 10_000.0, 10_000 * 10_000.0)  # 100, 1000, 10000 blocks
    return sweep(found, sizes, near_bytes=near_bytes, bytes_per_token=BYTES, requests=100, link=link, prefill=rate)


@pytest.mark.covers("TR-17")
def test_stops_where_a_larger_tier_only_moves_bytes_and_says_so() -> None:
    advice = advised()

    assert advice.recommended_bytes == 1e6
    assert advice.why[0].startswith(
        "0.001 GB instead of nothing: recomputed tokens 9,050 -> 50 (49.7% of all prompt tokens), waiting 1.8 -> 0.9 s"
    )
    assert [line.rpartition(": ")[2] for line in advice.why] == [
        "worth it",
        "not worth it, 0.0181 GB would be moved for that",  # 0.01 GB
        "not worth it, 0.0181 GB would be moved for that",  # 0.1 GB: half a per cent of the prompts' tokens
    ]


@pytest.mark.covers("TR-17")
def test_goes_up_as_long_as_each_size_saves() -> None:
    spread = curve((50, 300), (500, 300), (5000, 300))
    advice = advised(spread)
    assert advice.recommended_bytes == 1e8
    assert [line.endswith(": worth it") for line in advice.why] == [True] * 3


@pytest.mark.covers("TR-17")
def test_a_tier_slower_than_computing_is_none_at_any_size() -> None:
    advice = advised(link=SLOW)
    assert advice.recommended_bytes == 0
    assert all("(0.0% less): not worth it" in line for line in advice.why)
    assert {row.read_bytes for row in advice.rows} == {0.0}  # hits that are not worth reading


@pytest.mark.covers("TR-17")
def test_hits_without_shorter_waiting_are_not_enough() -> None:
    """A latency that eats up what the hits save."""
    advice = advised(link=Link("late", 1e9, 0.01))
    assert advice.rows[0].recomputed_tokens < 100
    assert advice.recommended_bytes == 0


@pytest.mark.covers("TR-17")
def test_what_the_near_tier_holds_is_no_gain_of_the_next() -> None:
    assert advised(near_bytes=60 * 10_000.0).recommended_bytes == 0


def test_a_trace_without_reuse_needs_nothing() -> None:
    nothing = make_curve(
        np.zeros(5, dtype=np.int64), np.full(5, 10), block_size_tokens=10, input_tokens=50, distinct_blocks=5
    )
    assert advised(nothing).recommended_bytes == 0


@pytest.mark.covers("TR-17")
def test_a_step_that_saves_nothing_does_not_hide_one_that_would() -> None:
    late = curve((500, 900))  # nothing within 100 blocks, all within 1000
    advice = advised(late)
    assert advice.recommended_bytes == 1e7
    assert [": worth it" in line for line in advice.why] == [False, True, False]
