"""Several tiers together: where copies go, what leaves, what is counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.config import StoreConfig
from kvrelay.edge.stores.file import FileStore
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.store import NoSpace
from kvrelay.edge.stores.tiered import TieredStore
from kvrelay.edge.stores.wrappers import Faulty, Metered
from tests.edge.stores.test_outages import KEYS, NAMESPACE, SHAPE, Remote, keep_all, load, open_over, payload, until

OBJECT_BYTES = SHAPE.payload_bytes + 512
TWO_TIERS = {"near": {"url": "memory://", "name": "near"}, "far": {"url": "memory://", "name": "far"}}


def stored(store: MemoryStore) -> set[int]:
    """Numbers of the chunks that lie in a store."""
    return {KEYS.index(info.key[8:]) for info in store.scan(deadline_s=1)}


@pytest.mark.covers("TR-13", "TR-16")
def test_a_full_tier_evicts_the_least_recently_used() -> None:
    near = MemoryStore(capacity_bytes=4 * OBJECT_BYTES)
    store = open_over(near, tiers=[{"url": "memory://", "bytes": 4 * OBJECT_BYTES}])
    for number in range(4):
        store.store(NAMESPACE, KEYS[number], SHAPE, [payload(number)])
    load(store, KEYS[:1])
    for number in (4, 5):
        assert store.store(NAMESPACE, KEYS[number], SHAPE, [payload(number)]).stored
        assert near.stats().used_bytes == 4 * OBJECT_BYTES
    assert stored(near) == {0, 3, 4, 5}
    store.close()


@pytest.mark.covers("TR-14")
def test_local_first_then_shared() -> None:
    near, far = Metered(MemoryStore()), Metered(Remote())
    store = open_over(near, far, tiers=list(TWO_TIERS.values()))
    keep_all(store)
    near.calls.clear(), far.calls.clear()
    assert load(store).ready
    assert near.calls["sizes"] == 1 and near.calls["read"] == len(KEYS)
    assert "sizes" not in far.calls and "read" not in far.calls
    store.close()


@pytest.mark.covers("TR-23")
def test_evicted_to_the_tier_below_and_promoted_again_bit_for_bit() -> None:
    near, far = MemoryStore(), Remote()
    tiers = [{**TWO_TIERS["near"], "bytes": 2 * OBJECT_BYTES}, {**TWO_TIERS["far"], "write": "back"}]
    store = open_over(near, far, tiers=tiers, deadline_ms=5000.0)
    keep_all(store)
    until(lambda: stored(near) == {4, 5} and stored(far) == {0, 1, 2, 3}, within_s=5)
    assert load(store, KEYS[:1]).ready  # the bytes are compared there
    until(lambda: 0 in stored(near), within_s=5)
    assert load(store, KEYS[:1]).bytes_by_tier["far"] == 0
    store.close()


def test_a_copy_of_which_the_tier_below_keeps_a_part_only_is_not_announced() -> None:
    """Seed 75 of the fuzz: writes were asked back for their size, copies between tiers were not."""
    near, below = MemoryStore(), Remote()
    announced: list[tuple[str, bytes]] = []
    tiers = [{**TWO_TIERS["near"], "bytes": 2 * OBJECT_BYTES}, {**TWO_TIERS["far"], "write": "back"}]
    config = StoreConfig.from_mapping({"tiers": tiers}, source="test")
    store = TieredStore(
        config,
        stores=[near, Faulty(below, break_writes="silent")],
        announce=lambda tier, key, stored_bytes: announced.append((tier, key)),
    )
    keep_all(store)
    copied = [{"tier": store.config.tier_names()[1], "op": "copy", "outcome": "partial", "count": 4}]
    until(lambda: [op for op in store.report()["ops"] if op["op"] == "copy"] == copied, within_s=5)
    assert {tier for tier, _ in announced} == {"near"} and stored(below) == set()
    store.close()


@pytest.mark.covers("TR-21")
@pytest.mark.parametrize(
    ("policy", "first", "second"), [("through", 6, 6), ("back", 0, 0), ("selective", 0, 6), ("never", 0, 0)]
)
def test_write_policies_write_what_they_say(policy: str, first: int, second: int) -> None:
    """Six chunks saved once, then once more after the near tier forgot them."""
    near, far = MemoryStore(), Remote()
    store = open_over(near, far, tiers=[TWO_TIERS["near"], {**TWO_TIERS["far"], "write": policy}])

    def written() -> int:
        return sum(e["bytes"] for e in store.report()["bytes"] if e["tier"] == "far" and e["direction"] == "written")

    keep_all(store)
    assert written() == first * OBJECT_BYTES
    near.delete([info.key for info in near.scan(deadline_s=1)], deadline_s=1)
    keep_all(store)
    assert written() == second * OBJECT_BYTES
    store.close()


@pytest.mark.covers("TR-22")
def test_warming_brings_chunks_near_in_the_background() -> None:
    near, far = MemoryStore(), Remote()
    first = open_over(far)
    keep_all(first)
    store = open_over(near, far, tiers=list(TWO_TIERS.values()))
    store.warm(NAMESPACE, KEYS, SHAPE)
    until(lambda: len(stored(near)) == len(KEYS), within_s=5)
    assert load(store).bytes_by_tier["far"] == 0
    store.close()


@pytest.mark.covers("TR-05", "TR-11")
def test_two_processes_share_only_what_they_were_told_to(tmp_path: Path) -> None:
    alone_a, alone_b = open_over(MemoryStore()), open_over(MemoryStore())
    keep_all(alone_a)
    assert alone_b.lookup(NAMESPACE, KEYS, SHAPE).keys == ()
    a, b = (open_over(FileStore(tmp_path), deadline_ms=5000.0) for _ in range(2))
    keep_all(a)
    assert load(b).leading_hits == len(KEYS)
    for store in (alone_a, alone_b, a, b):
        store.close()


@pytest.mark.covers("S38")
def test_a_disk_that_is_nearly_full_already(tmp_path: Path) -> None:
    """A limit of 100 objects, 90 lie there from the last run, 300 more come: never more than the limit and one."""
    limit = 100 * OBJECT_BYTES
    config = {"url": f"file://{tmp_path}", "bytes": limit}
    before = open_over(FileStore(tmp_path, capacity_bytes=limit), tiers=[config])
    for number in range(90):
        before.store(NAMESPACE, number.to_bytes(32, "big"), SHAPE, [payload(number)])
    before.close()
    disk = FileStore(tmp_path, capacity_bytes=limit)
    store = open_over(disk, tiers=[config])
    assert store.report()["tiers"]["file"]["used_bytes"] == 90 * OBJECT_BYTES
    for number in range(90, 390):
        assert store.store(NAMESPACE, number.to_bytes(32, "big"), SHAPE, [payload(number)]).stored
        if number % 50 == 0:
            used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
            assert used <= limit + OBJECT_BYTES
    left = {int.from_bytes(info.key[8:], "big") for info in disk.scan(deadline_s=1)}
    assert left == set(range(290, 390)), "the oldest went first, those of the last run before all others"
    store.close()


def test_the_limit_of_a_directory_binds_all_who_share_it(tmp_path: Path) -> None:
    a, b = (FileStore(tmp_path, capacity_bytes=1000) for _ in range(2))
    a.write(b"1" * 40, [b"x" * 700], only_if_absent=True, deadline_s=1)
    with pytest.raises(NoSpace):
        b.write(b"2" * 40, [b"x" * 400], only_if_absent=True, deadline_s=1)
    b.delete([b"1" * 40], deadline_s=1)
    b.write(b"2" * 40, [b"x" * 400], only_if_absent=True, deadline_s=1)
    a.close(), b.close()


@pytest.mark.covers("S35", "S36")
def test_a_writer_that_is_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """The process dies with half of the file written, as often as it takes to hit that moment."""
    script = (
        "import sys, pathlib; from kvrelay.edge.stores.file import FileStore\n"
        "store = FileStore(pathlib.Path(sys.argv[1])); print('up', flush=True)\n"
        "n = 0\n"
        "while True:\n"
        "    store.write(n.to_bytes(40, 'big'), [b'x' * (8 << 20)], only_if_absent=True, deadline_s=9); n += 1\n"
        "    store.delete([(n - 1).to_bytes(40, 'big')], deadline_s=9)\n"
    )
    left_behind = 0
    for attempt in range(12):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.02 + 0.007 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        left_behind += len(list((tmp_path / "partial").iterdir()))
        store = FileStore(tmp_path)
        assert not list((tmp_path / "partial").iterdir()), "what the dead left was not cleared"
        sizes = {info.stored_bytes for info in store.scan(deadline_s=1)}
        assert sizes <= {8 << 20}, "a part of an object has a name"
        store.delete([info.key for info in store.scan(deadline_s=1)], deadline_s=1)
        assert store.stats().used_bytes == 0
        store.close()
        if left_behind:
            break
    assert left_behind, "no writer was caught in the middle"


def test_expired_objects_are_no_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_over(Remote(), ttl_s=100.0)
    keep_all(store)
    later = time.time() + 101
    monkeypatch.setattr("kvrelay.edge.stores.reading.time.time", lambda: later)
    plan = store.plan(NAMESPACE, KEYS[:1], SHAPE)
    assert store.fetch(plan, [memoryview(bytearray(SHAPE.payload_bytes))]).outcomes == (Outcome.EXPIRED,)
    store.close()


def test_a_tier_forgets_after_its_time_to_live() -> None:
    near = MemoryStore()
    store = open_over(near, tiers=[{"url": "memory://", "ttl_s": 0.2}])
    keep_all(store)
    assert load(store).ready
    until(lambda: not stored(near), within_s=5)
    store.close()
