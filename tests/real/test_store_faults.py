"""The fault matrix with more than 10,000 generated cases, on real servers and on stores that need none.

Prints the table of outcomes, in which no cell is empty: what a store cannot meet stands there with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.stores.faults import EVERY_FAULT_IN_EVERY_SETUP, run_cases
from tests.conformance.stores.matrix import STORES, Table, impossible_for, missing, printed
from tests.conformance.stores.places import Directory, Memory, Peer, SharedMemory
from tests.conformance.stores.service import Place, run_service_faults
from tests.real.store_places import ServedPlace, begin_anew, limit_files, limit_valkeys
from tests.real.store_servers import (
    S3_KEYS,
    ServerUnavailable,
    mooncake,
    running,
    seaweed,
    valkey,
    valkey_cluster,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
_table: Table = {}
_cannot_run: dict[str, str] = {}


@contextmanager
def _memory(folder: Path) -> Iterator[Memory]:
    yield Memory()


@contextmanager
def _shared(folder: Path) -> Iterator[SharedMemory]:
    place = SharedMemory()
    try:
        yield place
    finally:
        place.remove()


@contextmanager
def _file(folder: Path) -> Iterator[Directory]:
    yield Directory(folder)


@contextmanager
def _peer(folder: Path) -> Iterator[Peer]:
    place = Peer()
    try:
        yield place
    finally:
        place.kill()


@contextmanager
def _valkey(folder: Path) -> Iterator[ServedPlace]:
    with running([valkey(folder)]) as (server,):
        yield ServedPlace(f"valkey://127.0.0.1:{server.port}", [server], set_full=limit_valkeys([server]))


@contextmanager
def _cluster(folder: Path) -> Iterator[ServedPlace]:
    servers = valkey_cluster(folder)
    try:
        url = f"valkey://127.0.0.1:{servers[0].port}?cluster=1"
        yield ServedPlace(url, servers, set_full=limit_valkeys(servers))
    finally:
        for server in servers:
            server.kill()


@contextmanager
def _s3(folder: Path) -> Iterator[ServedPlace]:
    with running([seaweed(folder)]) as (server,), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", S3_KEYS[0])
        patch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEYS[1])
        url = f"s3://kvrelay/faults?endpoint=http://127.0.0.1:{server.port}"
        yield ServedPlace(url, [server], set_full=limit_files(server, folder))


@contextmanager
def _mooncake(folder: Path) -> Iterator[ServedPlace]:
    master, admin = mooncake(folder)
    with running([master]) as (server,):
        url = f"mooncake://127.0.0.1:{server.port}?admin={admin}&segment_bytes="
        yield ServedPlace(url + str(256 << 20), [server], set_full=begin_anew(server), full_url=url + str(16 << 20))


Opened = Callable[[Path], "contextmanager[Place]"]
ROUNDS: dict[str, tuple[Opened, int]] = {  # type: ignore[type-arg]
    "memory": (_memory, 14),
    "shared memory": (_shared, 4),
    "file": (_file, 6),
    "peer": (_peer, 6),
    "valkey": (_valkey, 6),
    "cluster": (_cluster, 2),
    "s3": (_s3, 1),
    "mooncake": (_mooncake, 1),
}


@pytest.mark.covers("SG-16", "S37", "S39", "CC-16", "CC-17")
@pytest.mark.parametrize("name", STORES)
def test_never_a_wrong_byte(name: str, tmp_path: Path) -> None:
    _meet_every_fault(name, tmp_path)
    if name in _cannot_run:
        pytest.skip(_cannot_run[name])


def _meet_every_fault(name: str, folder: Path) -> None:
    open_place, rounds = ROUNDS[name]
    cases = rounds * EVERY_FAULT_IN_EVERY_SETUP
    try:
        with open_place(folder / "store") as place:  # type: ignore[attr-defined]
            store = place.open()
            done = run_cases(store, cases=cases, seed=cases)
            store.close()
            assert sum(outcomes.total() for outcomes in done.values()) == cases
            _table[name] = {**done, **run_service_faults(place, impossible_for(name))}
    except ServerUnavailable as reason:
        _cannot_run[name] = str(reason)


def test_no_cell_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every store met every fault, or the reason why it cannot is named. Stores that the above has not been through in
    this process, because this was asked for alone, meet them here."""
    for name in STORES:
        if name not in _table and name not in _cannot_run:
            _meet_every_fault(name, tmp_path / name)
    with capsys.disabled():
        print(f"\n{printed(_table)}")
    assert sum(rounds for _, rounds in ROUNDS.values()) * EVERY_FAULT_IN_EVERY_SETUP >= 10_000
    ran = tuple(store for store in STORES if store not in _cannot_run)
    assert missing(_table, ran) == []
