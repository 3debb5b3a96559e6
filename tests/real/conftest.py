"""Two real vLLM workers for the whole test run, and a gateway in front of them for each test that wants one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from kvrelay.edge.system.ports import spare_port
from tests.real.client import Client
from tests.real.engine import EngineUnavailable, VllmWorker, installed
from tests.real.kv_pair import kv_pair as kv_pair


class RealWorker(Protocol):
    @property
    def url(self) -> str: ...


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmWorker, VllmWorker]]:
    folder = tmp_path_factory.mktemp("vllm")
    pair: tuple[VllmWorker, ...] = ()
    try:
        engine = installed()
        cores = os.cpu_count() or 1
        pair = tuple(
            VllmWorker(engine, name, port=spare_port(), cpu=i % cores, folder=folder) for i, name in enumerate("ab")
        )
        for worker in pair:
            worker.start()
        for worker in pair:
            worker.wait_until_up()
        yield pair[0], pair[1]
    except EngineUnavailable as reason:
        pytest.fail(f"the real engine cannot run here: {reason}", pytrace=False)
    finally:
        for worker in pair:
            worker.kill()


@contextmanager
def gateway(
    workers: Iterable[RealWorker],
    receipts: Path,
    *,
    index_state: str = "live",
    kv_reports: Mapping[str, str] | None = None,
) -> Iterator[Client]:
    """`kvrelay serve` as a process of its own, once it believes of every worker what it can.

    `kv_reports`: where the KV connectors of workers answer, by the workers' URLs.
    """
    workers = tuple(workers)
    config = receipts.with_suffix(".toml")
    entries = [{"url": worker.url, "kv_report": (kv_reports or {}).get(worker.url)} for worker in workers]
    lines = [[f"{key} = {json.dumps(value)}" for key, value in entry.items() if value] for entry in entries]
    config.write_text("".join("[[workers]]\n" + "\n".join(entry) + "\n" for entry in lines))
    command = [sys.executable, "-m", "kvrelay.cli.main", "serve", "--port", "0", "--admin-port", "0", "--json"]
    command += ["-c", str(config)]
    environment = {**os.environ, "KVRELAY_HEALTH__INTERVAL_S": "0.5", "KVRELAY_RECEIPTS__PATH": str(receipts)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        client = Client(ready["url"], ready["admin_url"], receipts)
        client.wait_for_live(len(workers), index_state)
        yield client
    finally:
        process.terminate()
        process.communicate(timeout=60)
