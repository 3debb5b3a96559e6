"""The tiered store as a connector sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrelay.core.contract.identity import Namespace, block_identities
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.ciphers import CIPHERS
from kvrelay.edge.stores.keys import parse_key_ring
from kvrelay.edge.stores.tiered import ChunkShape, TieredStore

SHAPE = ChunkShape(tokens=32, payload_bytes=8192, layers=2, dtype="bfloat16", shape=(2, 32, 2, 32))
NAMESPACE = Namespace(b"c" * 32, "tenant-a", b"secret of a", 0)
KEYS = block_identities(NAMESPACE, np.arange(32 * 6, dtype=np.uint32), 32)
RINGS = [parse_key_ring(f"k1 {'ab' * 32}", source="the test", cipher=name) for name in CIPHERS]


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SHAPE.payload_bytes)


def open_tiers(*tiers: Mapping[str, Any], **options: Any) -> TieredStore:
    ring = options.pop("ring", None)
    return TieredStore.open({"tiers": tiers, "deadline_ms": 2000, **options}, ring=ring)


def keep_all(store: TieredStore) -> None:
    for number, key in enumerate(KEYS):
        assert store.store(NAMESPACE, key, SHAPE, [payload(number)], start_token=32 * number).stored


def load_all(store: TieredStore) -> tuple[tuple[Outcome, ...], list[bytes]]:
    plan = store.lookup(NAMESPACE, KEYS, SHAPE)
    into = [bytearray(SHAPE.payload_bytes) for _ in plan.keys]
    outcome = store.fetch(plan, [memoryview(buffer) for buffer in into])
    return outcome.outcomes, [bytes(buffer) for buffer in into]


@pytest.fixture(params=["plain", "encrypted", "encrypted by aegis", "in pieces", "encrypted, packed, in pieces"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    opened = open_tiers(
        {"url": "memory://", "bytes": 40_000},
        {"url": f"file://{tmp_path}", "codec": "zstd" if "packed" in request.param else "raw"},
        ring=RINGS["aegis" in request.param] if "encrypted" in request.param else None,
        piece_bytes=3000 if "pieces" in request.param else 1 << 20,
    )
    yield opened
    opened.close()


def test_gives_back_what_was_stored(store: TieredStore) -> None:
    keep_all(store)
    outcomes, found = load_all(store)
    assert outcomes == (Outcome.HIT,) * 6
    assert found == [payload(number) for number in range(6)]


def test_another_process_with_the_same_disk_hits(store: TieredStore, tmp_path: Path) -> None:
    keep_all(store)
    ring = store._ring if store._ring.encrypts else None
    other = open_tiers({"url": f"file://{tmp_path}"}, ring=ring)
    assert load_all(other) == ((Outcome.HIT,) * 6, [payload(number) for number in range(6)])
    other.close()


def test_deleting_reaches_every_tier(store: TieredStore) -> None:
    keep_all(store)
    assert store.delete(NAMESPACE, KEYS)["file"] == 6
    assert store.lookup(NAMESPACE, KEYS, SHAPE).keys == ()


def test_what_another_process_fetched_moves_the_break_even(tmp_path: Path) -> None:
    store = open_tiers({"url": f"file://{tmp_path}", "name": "disk"}, deadline_ms=30_000)
    try:
        keep_all(store)
        store.observe_prefill(tokens=1000, ms=100.0)
        size = len(KEYS) * SHAPE.payload_bytes
        store.observe_fetch({"disk": size}, {"disk": 5_000.0})
        slow = store.lookup(NAMESPACE, KEYS, SHAPE)
        assert not slow.fetch and slow.predicted_fetch_ms == pytest.approx(5_000.0)
        assert slow.predicted_recompute_ms is not None and slow.predicted_recompute_ms < 5_000.0
        for _ in range(100):  # the slow tier may have been measured meanwhile, and weighs in
            store.observe_fetch({"disk": size}, {"disk": 1.0})
        assert store.lookup(NAMESPACE, KEYS, SHAPE).fetch
    finally:
        store.close()
