"""Eviction policies against what they promise, LRU against a naive model, and a ledger that never exceeds its limit."""

from __future__ import annotations

import random

import pytest

from kvrelay.core.tiers.eviction.lfu import Lfu
from kvrelay.core.tiers.eviction.lru import Lru
from kvrelay.core.tiers.eviction.s3fifo import S3Fifo
from kvrelay.core.tiers.eviction.ttl import Ttl
from kvrelay.core.tiers.ledger import POLICIES, Ledger


def key(number: int) -> bytes:
    return bytes([number])


def drained(policy) -> list[int]:  # type: ignore[no-untyped-def]
    order = []
    while (victim := policy.victim()) is not None:
        policy.remove(victim)
        order.append(victim[0])
    return order


@pytest.mark.covers("TR-16")
def test_lru_is_the_order_of_last_use() -> None:
    chance, policy, model = random.Random(3), Lru(), []
    for _ in range(2000):
        number = chance.randrange(20)
        match chance.choice("itr"):
            case "i":
                policy.insert(key(number), 0.0)
                model = [n for n in model if n != number] + [number]
            case "t":
                policy.touch(key(number), 0.0)
                model = [n for n in model if n != number] + [number] if number in model else model
            case _:
                policy.remove(key(number))
                model = [n for n in model if n != number]
        assert policy.victim() == (key(model[0]) if model else None)
    assert drained(policy) == model


def test_ttl_ignores_use() -> None:
    policy = Ttl()
    for number in range(4):
        policy.insert(key(number), 0.0)
    policy.touch(key(0), 1.0)
    assert drained(policy) == [0, 1, 2, 3]


def test_lfu_keeps_what_is_used_often_and_forgets_old_fame() -> None:
    policy = Lfu()
    for number in range(4):
        policy.insert(key(number), 0.0)
    for number in (1, 1, 1, 2, 2, 3):
        policy.touch(key(number), 0.0)
    assert drained(policy) == [0, 3, 2, 1]
    famous = Lfu()
    famous.insert(key(0), 0.0)
    famous.insert(key(1), 0.0)
    for _ in range(20):
        famous.touch(key(0), 0.0)
    for _ in range(500):
        famous.touch(key(1), 0.0)
    assert famous.victim() == key(0)


def test_s3fifo_is_not_flushed_by_a_scan() -> None:
    policy = S3Fifo()
    for number in range(10):
        policy.insert(key(number), 0.0)
        policy.touch(key(number), 0.0)
    for number in range(10, 200):  # seen once and never again, one in, one out
        policy.insert(key(number), 0.0)
        victim = policy.victim()
        assert victim is not None
        policy.remove(victim)
    left = set(drained(policy))
    assert len(set(range(10)) - left) <= 1, "the shared ones survive, but for a tenth that is room for newcomers"


@pytest.mark.covers("TR-13")
@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_a_ledger_never_exceeds_its_limit(eviction) -> None:  # type: ignore[no-untyped-def]
    chance = random.Random(eviction)
    ledger = Ledger(capacity_bytes=1000, ttl_s=None, eviction=eviction)
    under_way: list[tuple[bytes, int]] = []
    for step in range(3000):
        name, size = key(chance.randrange(200)), chance.randrange(1, 300)
        match chance.choice("sstx"):
            case "s" if ledger.fits(size) and name not in ledger and all(name != other for other, _ in under_way):
                ledger.victims(size)
                ledger.reserve(name, size)
                under_way.append((name, size))
            case "t":
                ledger.touch(name, step)
            case _ if under_way:
                ended, ended_bytes = under_way.pop(chance.randrange(len(under_way)))
                if chance.random() < 0.8:
                    ledger.commit(ended, ended_bytes, step)
                else:
                    ledger.cancel(ended)
        ledger.check()
