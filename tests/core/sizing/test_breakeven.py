"""Fetch or compute, memory of the host, chunks and money: arithmetic that people rely on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.sizing.breakeven import Link, Prefill, breakeven_tokens, point
from kvrelay.core.sizing.chunks import fits, rechunk, transfer_efficiency
from kvrelay.core.sizing.cost import Prices, cost_row
from kvrelay.core.sizing.memory import judge_memory

BYTES = 131_072
LINK = Link("ethernet", 1.25e9, 0.0005)


@pytest.mark.covers("TU-06")
def test_a_prefix_is_fetched_from_its_break_even_length_on():
    rate = Prefill("8,000 tokens/s", 8_000)
    least = breakeven_tokens(LINK, rate, bytes_per_token=BYTES)
    assert least == 25  # 0.5 ms / (125 us - 104.9 us)
    assert point(least, LINK, rate, bytes_per_token=BYTES).fetch
    assert not point(least - 1, LINK, rate, bytes_per_token=BYTES).fetch


@pytest.mark.covers("TU-06")
def test_where_a_token_travels_longer_than_it_is_computed_no_length_helps():
    assert breakeven_tokens(LINK, Prefill("fast", 32_000), bytes_per_token=BYTES) is None
    found = point(4096, LINK, Prefill("fast", 32_000), bytes_per_token=BYTES)
    assert not found.fetch and found.breakeven_latency_s is None
    assert found.breakeven_bytes_per_s > LINK.bytes_per_s


@pytest.mark.covers("TU-06")
@given(st.integers(1, 10**6), st.floats(1e6, 1e11), st.floats(0, 1), st.floats(100, 1e6))
def test_at_the_break_even_bandwidth_and_latency_both_take_equally_long(tokens, bytes_per_s, latency_s, rate):
    prefill = Prefill("any", rate)
    found = point(tokens, Link("any", bytes_per_s, latency_s), prefill, bytes_per_token=BYTES)
    if found.breakeven_bytes_per_s is not None:
        there = point(tokens, Link("", found.breakeven_bytes_per_s, latency_s), prefill, bytes_per_token=BYTES)
        assert there.fetch_s == pytest.approx(there.compute_s)
    if found.breakeven_latency_s is not None:
        there = point(tokens, Link("", bytes_per_s, found.breakeven_latency_s), prefill, bytes_per_token=BYTES)
        assert there.fetch_s == pytest.approx(there.compute_s)
    assert found.fetch == (found.breakeven_latency_s is not None and latency_s <= found.breakeven_latency_s) or (
        found.fetch_s == pytest.approx(found.compute_s)
    )


@pytest.mark.covers("TU-08")
def test_most_of_a_host_is_no_cache():
    asked = {"host_bytes": 128e9, "engine_bytes": 16e9, "asked_bytes": 120e9}
    refused = judge_memory(**asked)
    assert not refused.safe and refused.most_bytes == pytest.approx(99.2e9)
    assert not judge_memory(**asked, buffer_bytes=0.0).safe
    assert judge_memory(**{**asked, "asked_bytes": 90e9}).safe


@pytest.mark.covers("TU-01")
def test_chunks_of_many_blocks_and_parts_of_blocks():
    blocks, starts = np.array([0, 1, 2, 0, 1, 3]), np.array([0, 3, 6])
    tokens = np.array([64 * 2 + 40, 64 * 3])
    large = rechunk(blocks, starts, tokens, block_tokens=64, chunk_tokens=128)
    assert large.chunks.tolist() == [0, 0] and large.starts.tolist() == [0, 1, 2]
    small = rechunk(blocks, starts, tokens, block_tokens=64, chunk_tokens=32)
    assert np.diff(small.starts).tolist() == [5, 6]
    assert small.chunks[:4].tolist() == small.chunks[5:9].tolist()
    assert small.distinct == 4 + 1 + 2
    assert fits(16, 512) and fits(1024, 512) and not fits(48, 64)


@pytest.mark.covers("TU-01")
def test_large_chunks_lose_less_around_the_payload():
    shares = [transfer_efficiency(n * BYTES, bytes_per_s=1.25e9, latency_s=0.001) for n in (16, 64, 256)]
    assert shares == sorted(shares) and shares[0] == pytest.approx(0.6265, abs=1e-3)


@pytest.mark.covers("TU-04")
def test_money_is_per_hour_of_the_trace():
    row = cost_row(730e9, 3_600_000, span_s=7200, prices=Prices(2.0, 0.5))
    assert (row.cost_per_hour, row.saved_per_hour) == (pytest.approx(2.0), pytest.approx(0.9))
    assert row.net_per_hour == pytest.approx(-1.1)
    assert cost_row(1e9, 1, span_s=0, prices=Prices(1, 1)) is None
