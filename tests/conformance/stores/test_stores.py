"""The suite against stores that need no server. Those that do: `tests/real/test_store_servers.py`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.peer import PeerStore
from kvrelay.edge.stores.server import StoreServer
from kvrelay.edge.stores.store import Store, StoreUnavailable
from kvrelay.edge.stores.wrappers import Faulty, Metered, Slow
from tests.conformance.stores.suite import StoreSuite


@pytest.fixture(params=["memory://", "memory://NAME", "file:///DIR"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    name = f"test-{os.getpid()}"
    opened = open_store(request.param.replace("/DIR", str(tmp_path)).replace("NAME", name))
    yield opened
    opened.close()
    shutil.rmtree(f"/dev/shm/kvrelay-{os.getuid()}-{name}", ignore_errors=True)


class TestStores(StoreSuite):
    pass


class TestPeer(StoreSuite):
    @pytest.fixture(params=["open", "with a token"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
        """A store behind a server, over loopback."""
        token = "a shared secret" if request.param != "open" else None
        (tmp_path / "token").write_text(token or "")
        server = StoreServer(MemoryStore(), token=token)
        query = f"?token_file={tmp_path / 'token'}" if token else ""
        opened = open_store(f"peer://127.0.0.1:{server.port}{query}")
        yield opened
        opened.close()
        server.close()


class TestWrappers(StoreSuite):
    """A wrapper that changes nothing is as good as what it wraps."""

    @pytest.fixture(params=[Metered, lambda inner: Slow(inner, latency_s=0.0), Faulty])
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        yield request.param(MemoryStore())


def test_a_peer_without_the_token_gets_nothing(tmp_path: Path) -> None:
    server = StoreServer(MemoryStore(), token="right")
    for token in (None, "wrong"):
        peer = PeerStore("127.0.0.1", server.port, token=token)
        with pytest.raises(StoreUnavailable):
            peer.ping(deadline_s=2.0)
        peer.close()
    server.close()
