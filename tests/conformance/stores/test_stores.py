"""The suite against stores that need no server. Those that do: `tests/real/test_store_servers.py`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.store import Store
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
