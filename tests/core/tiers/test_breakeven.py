"""Break-even: the boundary is where the two predictions meet, and what changed is believed soon."""

from __future__ import annotations

import pytest

from kvrelay.core.tiers.breakeven import FetchRate, PrefillRate, decide


@pytest.mark.covers("TU-06")
def test_the_boundary_per_prefix_length() -> None:
    """1 ms + 1 GB/s against 10,000 tokens/s: with 2,000 bytes a token, 1,000 tokens take 3 ms to fetch, 100 to
    compute."""
    fetch, prefill = FetchRate(), PrefillRate()
    for size in (1_000_000, 4_000_000, 9_000_000):
        fetch.observe(size, 0.001 + size / 1e9)
    prefill.observe(5000, 0.5)
    for tokens in (1, 4, 8, 11, 13, 20, 1000):
        fetch_s, recompute_s = fetch.predict_s(tokens * 2000), prefill.predict_s(tokens)
        assert fetch_s == pytest.approx(0.001 + tokens * 2000 / 1e9, rel=1e-6)
        assert decide(fetch_s, recompute_s).fetch == (tokens > 1000 / 98)  # 1 ms / (0.1 - 0.002) ms per token


def test_until_both_are_known_only_trying_tells() -> None:
    assert decide(None, 0.1).fetch and decide(0.1, None).fetch
    assert FetchRate().predict_s(1) is None and PrefillRate().predict_s(1) is None


def test_a_link_that_changed_is_believed_at_once() -> None:
    fetch = FetchRate()
    for _ in range(50):
        fetch.observe(1_000_000, 0.001)
    fetch.observe(1_000_000, 0.2)
    assert (fetch.predict_s(1_000_000) or 0) == pytest.approx(0.2)
    fetch.observe(1_000_000, 0.001)
    assert (fetch.predict_s(1_000_000) or 0) == pytest.approx(0.001)
