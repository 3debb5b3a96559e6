"""The conformance suite against real servers: Valkey alone and as a cluster, an S3 service, a peer in another
process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.edge.stores.backends import try_store
from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.store import NoSpace, Store, StoreUnavailable
from kvrelay.edge.stores.valkey import ValkeyStore
from tests.conformance.stores.suite import S, StoreSuite, content, key, write
from tests.real.store_servers import S3_KEYS, Server, ServerUnavailable, mooncake, seaweed, valkey, valkey_cluster

pytestmark = pytest.mark.real
_databases = itertools.count()


@pytest.fixture(scope="module")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = valkey(tmp_path_factory.mktemp("valkey"), "--databases", "64")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    servers = valkey_cluster(tmp_path_factory.mktemp("cluster"))
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = seaweed(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
    except ServerUnavailable as reason:
        pytest.fail(f"the S3 server cannot run here: {reason}", pytrace=False)
    yield server
    server.kill()


class TestValkey(StoreSuite):
    @pytest.fixture
    def store(self, valkey_server: Server) -> Iterator[Store]:
        opened = open_store(f"valkey://127.0.0.1:{valkey_server.port}/{next(_databases)}")
        yield opened
        opened.close()

    def test_a_full_server_has_no_space(self, tmp_path: Path) -> None:
        server = valkey(tmp_path / "full", "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
        server.start()
        store = open_store(f"valkey://127.0.0.1:{server.port}")
        try:
            with pytest.raises(NoSpace):
                for n in range(20):
                    write(store, key(n), content(n, 1_000_000))
            assert len(bytes(store.read(key(0), deadline_s=S) or b"")) == 1_000_000, "reading goes on"
        finally:
            store.close()
            server.kill()

    def test_survives_the_restart_of_the_server(self, tmp_path: Path) -> None:
        server = valkey(tmp_path / "restarted")
        server.start()
        store = open_store(f"valkey://127.0.0.1:{server.port}")
        write(store, key(1), content(1))
        server.kill()
        with pytest.raises(StoreUnavailable):
            store.read(key(1), deadline_s=S)
        server.start()
        assert store.read(key(1), deadline_s=S) is None
        store.close()
        server.kill()

    def test_a_password_from_a_file(self, tmp_path: Path) -> None:
        server = valkey(tmp_path / "locked", "--requirepass", "open sesame")
        server.start()
        (tmp_path / "password").write_text("open sesame\n")
        knows = open_store(f"valkey://127.0.0.1:{server.port}?password_file={tmp_path / 'password'}")
        does_not = ValkeyStore("127.0.0.1", server.port)
        try:
            write(knows, key(1), content(1))
            assert bytes(knows.read(key(1), deadline_s=S) or b"") == content(1)
            with pytest.raises(StoreUnavailable, match="NOAUTH"):
                does_not.read(key(1), deadline_s=S)
        finally:
            knows.close()
            does_not.close()
            server.kill()


class TestValkeyCluster(StoreSuite):
    @pytest.fixture
    def store(self, cluster: list[Server]) -> Iterator[Store]:
        opened = open_store(f"valkey://127.0.0.1:{cluster[1].port}?cluster=1")
        opened.delete([info.key for info in opened.scan(deadline_s=S)], deadline_s=S)
        yield opened
        opened.close()

    def test_objects_are_spread(self, store: Store, cluster: list[Server]) -> None:
        for n in range(60):
            write(store, key(n), content(n))
        alone = []
        for node in cluster:
            of_one = ValkeyStore("127.0.0.1", node.port)
            alone.append(sum(1 for _ in of_one.scan(deadline_s=S)))
            of_one.close()
        assert sum(alone) == 60 and min(alone) > 5, alone


class TestS3(StoreSuite):
    @pytest.fixture
    def store(self, s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEYS[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEYS[1])
        url = f"s3://kvrelay/prefix-{next(_databases)}?endpoint=http://127.0.0.1:{s3_server.port}"
        opened = open_store(url, deadline_s=5.0)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        server, admin = mooncake(tmp_path_factory.mktemp("mooncake"))
        server.start()
    except ServerUnavailable as reason:
        pytest.skip(f"Mooncake cannot run here: {reason}")
    yield f"mooncake://127.0.0.1:{server.port}?admin={admin}&segment_bytes={256 << 20}"
    server.kill()


class TestMooncake(StoreSuite):
    @pytest.fixture
    def store(self, master: str) -> Iterator[Store]:
        """One client at a time: each brings a segment, and takes it away when it is closed."""
        opened = open_store(master, deadline_s=5.0)
        yield opened
        opened.close()


@pytest.mark.covers("TR-18")
def test_a_probe_says_whether_a_server_works_now(
    valkey_server: Server, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis-like and an S3-like one; directories in `tests/cli/test_store.py`."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEYS[1])
    s3 = f"s3://kvrelay/probe?endpoint=http://127.0.0.1:{s3_server.port}"
    for url in (f"valkey://127.0.0.1:{valkey_server.port}", s3):
        tried = try_store(url, deadline_s=5.0)
        assert tried.problem is None and (tried.write_ms or 0) > 0 < (tried.read_ms or 0)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another one")
    refused = try_store(s3, deadline_s=5.0)
    assert refused.write_ms is None and "403 Forbidden" in (refused.problem or "")
