"""The fault matrix on stores without a server. On real servers, and with more cases:
`tests/real/test_store_faults.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.edge.stores.file import FileStore
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.peer import PeerStore
from kvrelay.edge.stores.server import StoreServer
from tests.conformance.stores.faults import FAULTS, SETUPS, run_cases

EVERY_FAULT_IN_EVERY_SETUP = len(FAULTS) * len(SETUPS)


@pytest.mark.covers("SG-16", "S37", "CC-15")
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
