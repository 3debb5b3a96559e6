"""The fault matrix on stores that need no server from elsewhere. The whole of it, on real servers and with more cases:
`tests/real/test_store_faults.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.edge.stores.file import FileStore
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.peer import PeerStore
from kvrelay.edge.stores.server import StoreServer
from tests.conformance.stores.faults import EVERY_FAULT_IN_EVERY_SETUP, FAULTS, run_cases
from tests.conformance.stores.matrix import IMPOSSIBLE, STORES, impossible_for, missing, printed
from tests.conformance.stores.places import Directory, Memory, Peer, SharedMemory
from tests.conformance.stores.service import Place, run_service_faults


@pytest.mark.covers("SG-16", "S37", "CC-15", "CC-17")
def test_memory() -> None:
    done = run_cases(MemoryStore(), cases=3 * EVERY_FAULT_IN_EVERY_SETUP, seed=1)
    assert len(done) == len(FAULTS)


@pytest.mark.covers("SG-16", "S37")
def test_file(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    run_cases(store, cases=EVERY_FAULT_IN_EVERY_SETUP, seed=2)
    store.close()


def test_peer() -> None:
    server = StoreServer(MemoryStore())
    store = PeerStore("127.0.0.1", server.port)
    run_cases(store, cases=EVERY_FAULT_IN_EVERY_SETUP, seed=3)
    store.close()
    server.close()


@pytest.fixture(params=STORES[:4])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Place]]:
    match request.param:
        case "memory":
            yield request.param, Memory()  # type: ignore[misc]
        case "shared memory":
            shared = SharedMemory()
            yield request.param, shared  # type: ignore[misc]
            shared.remove()
        case "file":
            yield request.param, Directory(tmp_path / "kv")
        case _:
            peer = Peer()
            yield request.param, peer
            peer.kill()


@pytest.mark.covers("S35", "S39")
def test_slow_hung_refused_full_and_killed(place: tuple[str, Place]) -> None:
    """With the policy `fail` an outage is an error at once, and nothing is loaded or offered; a writer that dies leaves
    whole chunks or none."""
    name, one = place
    assert run_service_faults(one, impossible_for(name))


def test_a_table_with_a_hole_is_noticed() -> None:
    assert len(missing({})) + len(IMPOSSIBLE) == len(STORES) * (len(FAULTS) + 5)
    assert ("valkey", "hung") in missing({}) and ("memory", "hung") not in missing({})
    assert all(reason for reason in IMPOSSIBLE.values())
    assert printed({"memory": {}}).splitlines()[-1].startswith("(2) its only writer")
