"""Tiers that are slow, silent, full or gone: what a request pays for that, and what happens when they return."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.store import Store, StoreUnavailable
from kvrelay.edge.stores.tiered import FetchOutcome, TieredStore
from kvrelay.edge.stores.wrappers import Blackhole, Faulty, Metered, Refusing, Slow
from tests.edge.stores.test_tiered import KEYS, NAMESPACE, SHAPE, payload

DEADLINE_MS = 200.0


class Remote(MemoryStore):
    """Memory that is treated like a remote store: on threads of its own."""

    kind = "remote double"


def open_over(*stores: Store, tiers: Sequence[dict[str, Any]] | None = None, **options: Any) -> TieredStore:
    config = {"deadline_ms": DEADLINE_MS, "probe_interval_s": 0.4, **options}
    return TieredStore.open({"tiers": tiers or [{"url": "memory://"} for _ in stores], **config}, stores=stores)


def keep_all(store: TieredStore) -> None:
    for number, key in enumerate(KEYS):
        store.store(NAMESPACE, key, SHAPE, [payload(number)])


def load(store: TieredStore, keys: Sequence[bytes] = KEYS) -> FetchOutcome:
    """Look up, and fetch what is said to be there. Bytes of hits are checked."""
    plan = store.lookup(NAMESPACE, keys, SHAPE)
    into = [bytearray(SHAPE.payload_bytes) for _ in plan.keys]
    fetched = store.fetch(plan, [memoryview(buffer) for buffer in into])
    for key, outcome, buffer in zip(plan.keys, fetched.outcomes, into, strict=True):
        assert outcome is not Outcome.HIT or bytes(buffer) == payload(KEYS.index(key))
    return fetched


def timed(work: Any) -> float:
    began_s = time.monotonic()
    work()
    return (time.monotonic() - began_s) * 1000


def until(condition: Any, *, within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.covers("S39")
def test_a_hung_tier_costs_one_deadline_and_then_nothing() -> None:
    inner = Metered(Remote())
    hole = Blackhole(inner)
    hole.swallows = False
    store = open_over(hole, tiers=[{"url": "memory://", "max_fetches": 2}])
    keep_all(store)
    assert load(store).ready
    hole.swallows = True
    costs_ms = [timed(lambda: load(store)) for _ in range(20)]
    assert sum(cost_ms > DEADLINE_MS / 2 for cost_ms in costs_ms) == 1, f"each cost {costs_ms} ms"
    assert sum(costs_ms) < 2 * DEADLINE_MS, f"{costs_ms} ms for one deadline of {DEADLINE_MS} ms"
    assert not store.report()["tiers"]["memory"]["in_use"]

    hole.swallows = False
    inner.most_at_once = 0
    until(lambda: store.report()["tiers"]["memory"]["in_use"], within_s=5.0)
    threads = [threading.Thread(target=lambda: load(store)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert load(store).ready
    assert inner.most_at_once <= 2, "a burst at the return"
    store.close()


@pytest.mark.covers("S39")
def test_a_fetch_that_hangs_after_a_good_look_up_is_a_time_out_and_touches_nothing_later() -> None:
    slow = Slow(Remote(), latency_s=0.0)
    store = open_over(slow)
    keep_all(store)
    plan = store.lookup(NAMESPACE, KEYS, SHAPE)
    into = [bytearray(b"\xee" * SHAPE.payload_bytes) for _ in plan.keys]
    slow.latency_s = 0.35
    fetched = store.fetch(plan, [memoryview(buffer) for buffer in into])
    assert set(fetched.outcomes) == {Outcome.TIMEOUT}
    before = [bytes(buffer) for buffer in into]
    time.sleep(0.4)
    assert [bytes(buffer) for buffer in into] == before, "bytes arrived in memory that the engine has back"
    store.close()


@pytest.mark.covers("S39")
def test_starts_without_its_remote_tier() -> None:
    refusing = Refusing(Remote())
    store = open_over(MemoryStore(), refusing, tiers=[{"url": "memory://"}, {"url": "memory://", "name": "far"}])
    keep_all(store)
    assert load(store).ready, "the near tier works alone"
    assert not store.report()["tiers"]["far"]["in_use"]
    refusing.refuses = False
    until(lambda: store.report()["tiers"]["far"]["in_use"], within_s=5.0)
    store.store(NAMESPACE, b"k" * 32, SHAPE, [payload(9)])
    assert store.lookup(NAMESPACE, [b"k" * 32], SHAPE).keys
    store.close()


def test_refused_and_absent_are_told_apart() -> None:
    refusing = Refusing(Remote())
    refusing.refuses = False
    store = open_over(refusing)
    keep_all(store)
    missing = store.lookup(NAMESPACE, [b"q" * 32], SHAPE)
    assert missing.keys == () and missing.unasked == ()
    refusing.refuses = True
    gone = store.lookup(NAMESPACE, KEYS, SHAPE)
    assert gone.keys == () and gone.unasked == ("memory",)
    store.close()


@pytest.mark.covers("S35")
@pytest.mark.parametrize("how", ["partial", "silent", "full"])
def test_a_write_that_failed_is_never_offered(how: str) -> None:
    faulty = Faulty(Remote(), break_writes=how)
    store = open_over(faulty, probe_interval_s=0.1)
    outcome = store.store(NAMESPACE, KEYS[0], SHAPE, [payload(0)])
    wanted = {"partial": Outcome.UNAVAILABLE, "silent": Outcome.PARTIAL, "full": Outcome.NO_SPACE}[how]
    assert outcome.by_tier == {"memory": wanted} and not outcome.stored
    until(
        lambda: faulty.inner.sizes([next(iter(store._owners.values())).tag + KEYS[0]], deadline_s=1) == [None],
        within_s=5,
    )
    until(lambda: store.report()["tiers"]["memory"]["in_use"], within_s=5.0)
    assert store.lookup(NAMESPACE, KEYS[:1], SHAPE).keys == ()
    faulty.break_writes = "none"
    assert store.store(NAMESPACE, KEYS[0], SHAPE, [payload(0)]).stored
    assert load(store, KEYS[:1]).ready
    store.close()


def test_the_policy_decides_what_a_bad_chunk_leads_to() -> None:
    for policy in ("recompute", "fail", "fallback"):
        near, far = MemoryStore(), Remote()
        tiers = [{"url": "memory://"}, {"url": "memory://", "name": "far"}]
        store = open_over(near, far, tiers=tiers, failure_policy=policy)
        keep_all(store)
        (third,) = [info.key for info in near.scan(deadline_s=1) if info.key.endswith(KEYS[2])]
        near.write(third, [b"x" * 8704], only_if_absent=False, deadline_s=1)
        plan = store.plan(NAMESPACE, KEYS, SHAPE)
        fetched = store.fetch(plan, [memoryview(bytearray(SHAPE.payload_bytes)) for _ in KEYS])
        if policy == "fallback":
            assert fetched.ready and fetched.bytes_by_tier["far"] > 0
        else:
            assert fetched.leading_hits == 2 and fetched.outcomes[2] is Outcome.CORRUPT
            assert fetched.failed == (policy == "fail")
        store.close()


@pytest.mark.covers("TU-06", "TR-07")
def test_a_tier_slower_than_computing_is_left_alone_until_it_is_fast_again() -> None:
    slow = Slow(Remote(), latency_s=0.0)
    store = open_over(slow, deadline_ms=2000.0, sample_interval_s=0.2)
    keep_all(store)
    store.observe_prefill(tokens=SHAPE.tokens * len(KEYS), ms=60.0)
    assert store.lookup(NAMESPACE, KEYS, SHAPE).fetch and load(store).ready
    slow.latency_s = 0.15
    load(store)  # pays for learning it
    plan = store.lookup(NAMESPACE, KEYS, SHAPE)
    assert not plan.fetch
    assert plan.predicted_fetch_ms is not None and plan.predicted_recompute_ms is not None
    assert plan.predicted_fetch_ms > plan.predicted_recompute_ms
    assert plan.reason == (
        f"fetching would take {plan.predicted_fetch_ms:.1f} ms, computing {plan.predicted_recompute_ms:.1f} ms"
    )
    slow.latency_s = 0.0

    def used_again() -> bool:
        return store.lookup(NAMESPACE, KEYS, SHAPE).fetch

    until(used_again, within_s=10.0)
    assert load(store).ready
    store.close()


def test_one_fetch_for_many_who_want_the_same() -> None:
    metered = Metered(Slow(Remote(), latency_s=0.0))
    store = open_over(metered, deadline_ms=5000.0)
    keep_all(store)
    slow = metered.inner
    assert isinstance(slow, Slow)
    slow.latency_s = 0.05
    metered.calls.clear()
    plan = store.plan(NAMESPACE, KEYS, SHAPE)
    into = [[bytearray(SHAPE.payload_bytes) for _ in KEYS] for _ in range(5)]
    fetches = [store.fetch_async(plan, [memoryview(buffer) for buffer in buffers]) for buffers in into]
    assert all(fetch.result().ready for fetch in fetches)
    assert all([bytes(b) for b in buffers] == [payload(n) for n in range(len(KEYS))] for buffers in into)
    assert metered.calls["read"] == len(KEYS), "every key is read once"
    store.close()


def test_whoever_waits_when_a_store_is_closed_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a crew's queue nothing is run any more, and nobody is left to watch the time."""
    store = open_over(Remote())
    may_end = threading.Event()
    for _ in range(32):  # something else that keeps every hand busy, as the search for what others wrote does
        store._host.by_crew(0, lambda _: may_end.wait(10) and time.sleep(0.05))
    kept = store.store_async(NAMESPACE, KEYS[0], SHAPE, [payload(0)])
    crew = store._host._crews[0]
    assert crew is not None
    shut = crew.close
    monkeypatch.setattr(crew, "close", lambda: (may_end.set(), shut()))
    store.close()
    assert isinstance(kept.exception(timeout=5), StoreUnavailable)
    with pytest.raises(StoreUnavailable, match="closed"):
        store.lookup(NAMESPACE, KEYS, SHAPE)
