"""What the policies are held against: another library, and models of ten lines."""

from __future__ import annotations

import numpy as np
import pytest


def zipf_keys(count: int, *, seed: int = 3, distinct: int = 100_000, a: float = 1.2) -> list[int]:
    return (np.random.default_rng(seed).zipf(a, count) % distinct).tolist()


def library_hits(name: str, capacity: int, keys: list[int]) -> list[bool]:
    """Hit or miss of every access, by libCacheSim."""
    lib = pytest.importorskip("libcachesim", reason="an oracle of the `dev` extra")
    cache, request = getattr(lib, name)(capacity), lib.Request()
    hits = []
    for key in keys:
        request.obj_id, request.obj_size = key, 1
        hits.append(bool(cache.get(request)))
    return hits


def brute_force_ttl(capacity: int, ttl_s: float, accesses: list[tuple[int, float]]) -> list[bool]:
    """Looks at everything every time."""
    used: dict[int, float] = {}
    hits = []
    for key, now_s in accesses:
        used = {k: at for k, at in used.items() if now_s - at <= ttl_s}
        hits.append(key in used)
        used.pop(key, None)
        used[key] = now_s
        while len(used) > capacity:
            del used[next(iter(used))]
    return hits
