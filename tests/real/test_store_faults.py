"""The fault matrix with more than 10,000 generated cases, on real servers and on stores that need none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.peer import PeerStore
from kvrelay.edge.stores.server import StoreServer
from kvrelay.edge.stores.store import Store
from tests.conformance.stores.faults import FAULTS, run_cases
from tests.real.store_servers import S3_KEYS, ServerUnavailable, mooncake, seaweed, valkey, valkey_cluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@contextmanager
def _memory(folder: Path) -> Iterator[Store]:
    yield MemoryStore()


@contextmanager
def _file(folder: Path) -> Iterator[Store]:
    store = open_store(f"file://{folder}")
    yield store
    store.close()


@contextmanager
def _peer(folder: Path) -> Iterator[Store]:
    server = StoreServer(MemoryStore())
    store = PeerStore("127.0.0.1", server.port)
    yield store
    store.close()
    server.close()


@contextmanager
def _valkey(folder: Path) -> Iterator[Store]:
    server = valkey(folder)
    server.start()
    store = open_store(f"valkey://127.0.0.1:{server.port}")
    yield store
    store.close()
    server.kill()


@contextmanager
def _cluster(folder: Path) -> Iterator[Store]:
    servers = valkey_cluster(folder)
    store = open_store(f"valkey://127.0.0.1:{servers[0].port}?cluster=1")
    yield store
    store.close()
    for server in servers:
        server.kill()


@contextmanager
def _s3(folder: Path) -> Iterator[Store]:
    server = seaweed(folder)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", S3_KEYS[0])
        patch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEYS[1])
        store = open_store(f"s3://kvrelay/faults?endpoint=http://127.0.0.1:{server.port}", deadline_s=5.0)
    yield store
    store.close()
    server.kill()


@contextmanager
def _mooncake(folder: Path) -> Iterator[Store]:
    server, admin = mooncake(folder)
    server.start()
    store = open_store(f"mooncake://127.0.0.1:{server.port}?admin={admin}&segment_bytes={256 << 20}", deadline_s=5.0)
    yield store
    store.close()
    server.kill()


Opened = Callable[[Path], "contextmanager[Store]"]


@pytest.mark.covers("SG-16", "S37", "CC-16")
@pytest.mark.parametrize(
    ("store_of", "cases"),
    [(_memory, 5400), (_file, 1620), (_peer, 1620), (_valkey, 1620), (_cluster, 540), (_s3, 180), (_mooncake, 180)],
)
def test_never_a_wrong_byte(store_of: Opened, cases: int, tmp_path: Path) -> None:
    try:
        with store_of(tmp_path / "store") as store:  # type: ignore[attr-defined]
            done = run_cases(store, cases=cases, seed=cases)
    except ServerUnavailable as reason:
        pytest.skip(str(reason))
    assert set(done) == {fault.__name__ for fault in FAULTS} and done.total() == cases
