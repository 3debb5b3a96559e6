"""Ids under digests: the oldest go first."""

from __future__ import annotations

import numpy as np

from kvrelay.edge.tokens.cache import TokenCache


def test_the_cache_forgets_the_oldest_within_its_bytes() -> None:
    cache = TokenCache(max_bytes=3 * (400 + TokenCache.ENTRY_OVERHEAD_BYTES))
    ids = np.zeros(100, dtype=np.uint32)
    for key in (b"a", b"b", b"c"):
        cache.put(key, ids)
    cache.get(b"a")
    cache.put(b"d", ids)
    assert [key for key in (b"a", b"b", b"c", b"d") if cache.get(key) is not None] == [b"a", b"c", b"d"]
    cache.put(b"huge", np.zeros(10_000, dtype=np.uint32))
    assert cache.get(b"huge") is None and cache.get(b"d") is not None
