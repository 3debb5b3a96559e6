from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest

from kvrelay.lab.arms import leftovers as module
from kvrelay.lab.arms.leftovers import leftovers


@pytest.mark.covers("BM-30")
async def test_what_still_runs_or_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        found = await leftovers([os.getpid()], [f"http://127.0.0.1:{port}"])

    assert found == [f"process {os.getpid()}", f"port {port} on 127.0.0.1"]


@pytest.mark.covers("BM-30")
async def test_what_is_gone_leaves_nothing() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    assert await leftovers([process.pid], [f"tcp://127.0.0.1:{port}"]) == []
