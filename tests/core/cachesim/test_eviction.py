"""Every policy against an independent implementation, access by access."""

from __future__ import annotations

import random

import pytest
from tests.core.cachesim.oracle import brute_force_ttl, library_hits, zipf_keys

from kvrelay.core.cachesim.eviction.arc import Arc
from kvrelay.core.cachesim.eviction.belady import Belady, next_uses
from kvrelay.core.cachesim.eviction.fifo import Fifo
from kvrelay.core.cachesim.eviction.lfu import Lfu
from kvrelay.core.cachesim.eviction.lru import Lru
from kvrelay.core.cachesim.eviction.policy import Departure
from kvrelay.core.cachesim.eviction.s3fifo import S3Fifo
from kvrelay.core.cachesim.eviction.sieve import Sieve
from kvrelay.core.cachesim.eviction.ttl import Ttl

LIBRARY = {"LRU": Lru, "FIFO": Fifo, "LFU": Lfu, "ARC": Arc, "Sieve": Sieve, "S3FIFO": S3Fifo}
ONLINE = {**LIBRARY, "TTL": lambda capacity, on_gone: Ttl(capacity, on_gone, ttl_s=50.0)}


@pytest.mark.covers("TU-03")
@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("capacity", [50, 700])
def test_hits_and_misses_are_those_of_another_library(name, capacity):
    keys = zipf_keys(20_000)
    ours = LIBRARY[name](capacity)
    assert [ours.access(key, 0.0) for key in keys] == library_hits(name, capacity, keys)


@pytest.mark.covers("SM-01", "SM-02", "TP-10")
@pytest.mark.parametrize("capacity", [15, 40])
def test_time_to_live_against_brute_force(capacity):
    chance = random.Random(1)
    now_s, accesses = 0.0, []
    for _ in range(5000):
        now_s += chance.expovariate(1.0)
        accesses.append((chance.randrange(60), now_s))
    ours = Ttl(capacity, ttl_s=8.0)
    lru = Lru(capacity)
    hits = [ours.access(key, at) for key, at in accesses]
    assert hits == brute_force_ttl(capacity, 8.0, accesses)
    assert hits != [lru.access(key, at) for key, at in accesses]
    assert ours.expired > 0


@pytest.mark.covers("SM-01")
def test_what_is_idle_for_longer_than_its_time_is_missed_and_counted():
    cache = Ttl(100, ttl_s=10.0)
    cache.access(1, 0.0)
    assert cache.access(1, 10.0)
    assert not cache.access(1, 20.001)
    assert cache.expired == 1


@pytest.mark.parametrize("name", ONLINE)
def test_room_is_kept_and_every_key_leaves_once_for_each_time_it_came(name):
    chance = random.Random(2)
    present: set[int] = set()

    def left(key, why):
        assert why in Departure
        present.remove(key)

    cache = ONLINE[name](16, left)
    for now_s in range(3000):
        key = int(chance.paretovariate(0.7)) % 70
        was_present = key in present
        hit = cache.access(key, float(now_s))
        assert hit <= was_present  # it may have run out just now
        present.add(key)
        assert len(cache) <= 16
        assert {key for key in range(70) if key in cache} == present
    cache.clear(Departure.INVALIDATED)
    assert not present and len(cache) == 0


def test_nobody_beats_the_one_who_knows_the_future():
    chains = [(key,) for key in zipf_keys(5000, distinct=500)]
    best = Belady(30, future=next_uses(chains))
    most = sum(best.access(chain[0], 0.0) for chain in chains)
    for name, make in ONLINE.items():
        cache = make(30, lambda key, why: None)
        assert sum(cache.access(chain[0], 0.0) for chain in chains) <= most, name


def test_the_one_who_knows_the_future_is_right_on_a_trace_that_can_be_searched():
    chance = random.Random(4)
    for _ in range(30):
        keys = [chance.randrange(5) for _ in range(11)]
        cache = Belady(2, future=next_uses([(key,) for key in keys]))
        assert sum(cache.access(key, 0.0) for key in keys) == most_hits(tuple(keys), frozenset(), 2)


def most_hits(keys: tuple[int, ...], present: frozenset[int], capacity: int) -> int:
    """All choices, bypass included."""
    if not keys:
        return 0
    first, rest = keys[0], keys[1:]
    if first in present:
        return 1 + most_hits(rest, present, capacity)
    options = [present] + [present - {gone} | {first} for gone in present]
    if len(present) < capacity:
        options.append(present | {first})
    return max(most_hits(rest, option, capacity) for option in options)
