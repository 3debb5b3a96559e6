"""Shared memory: what is read twice is mapped, and a mapping never outlives its object's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvrelay.edge.stores import shm
from kvrelay.edge.stores.shm import SharedMemoryStore

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def store(tmp_path: Path) -> SharedMemoryStore:
    return SharedMemoryStore(tmp_path)


def put(store: SharedMemoryStore, key: bytes, content: bytes) -> None:
    store.write(key, [content], only_if_absent=False, deadline_s=1.0)


def get(store: SharedMemoryStore, key: bytes = KEY, room: int = 10_000) -> bytes | int | None:
    memory = bytearray(room)
    size = store.read_into(key, [memoryview(memory)[:7], memoryview(memory)[7:]], deadline_s=1.0)
    return size if size is None or size > room else bytes(memory[:size])


def test_every_read_gives_what_lies_under_the_name_now(store: SharedMemoryStore, tmp_path: Path) -> None:
    put(store, KEY, b"a" * 9_000)
    assert [get(store) for _ in range(4)] == [b"a" * 9_000] * 4
    put(store, KEY, b"b" * 9_000)
    assert [get(store) for _ in range(4)] == [b"b" * 9_000] * 4, "replaced, with the same length"
    SharedMemoryStore(tmp_path).delete([KEY], deadline_s=1.0)
    assert get(store) is None, "deleted by another process"
    put(store, KEY, b"c" * 20_000)
    assert [get(store) for _ in range(3)] == [20_000] * 3, "too long for the buffers: only its length"


def test_a_file_that_was_cut_short_is_short(store: SharedMemoryStore, tmp_path: Path) -> None:
    put(store, KEY, b"a" * 9_000)
    assert [get(store) for _ in range(3)] == [b"a" * 9_000] * 3
    (path,) = (tmp_path / "objects").rglob(KEY.hex())
    os.truncate(path, 100)
    assert [get(store) for _ in range(3)] == [b"a" * 100] * 3
    os.truncate(path, 0)
    assert [get(store) for _ in range(3)] == [b""] * 3


def test_mappings_are_bounded(store: SharedMemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "MAPPED_BYTES", 10_000)
    put(store, KEY, b"a" * 8_000)
    put(store, OTHER, b"b" * 8_000)
    for _ in range(3):
        assert (get(store, KEY), get(store, OTHER)) == (b"a" * 8_000, b"b" * 8_000)
        assert store.mapped_bytes <= 10_000
    assert store.mapped_bytes == 8_000, "one of them"
    store.close()
    assert store.mapped_bytes == 0
