"""Two real vLLM workers that share KV through a Valkey and a directory; started once for the whole run."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvrelay.edge.stores.config import open_store
from kvrelay.edge.system.ports import spare_port
from tests.real.engine import Engine, EngineUnavailable, installed
from tests.real.kv_worker import CHUNK_TOKENS, KvWorker
from tests.real.store_servers import S3_KEYS, Server, ServerUnavailable, seaweed, valkey

ADAPTER = "ad1"
SETTLED_S = 0.7
CREDENTIALS = {"AWS_ACCESS_KEY_ID": S3_KEYS[0], "AWS_SECRET_ACCESS_KEY": S3_KEYS[1]}


class Shared:
    """The tiers under both workers, as somebody with access to the machines sees them."""

    def __init__(self, valkey: Server, folder: Path, urls: Mapping[str, str]) -> None:
        self.valkey = valkey
        self.folder = folder
        self._urls = urls

    def files(self) -> set[Path]:
        return {file for file in self.folder.glob("objects/*/*") if file.is_file()}

    def settled_files(self) -> set[Path]:
        """Once nobody writes any more: who had to compute what was broken saves it anew, a little later."""
        before, since = self.files(), time.monotonic()
        while time.monotonic() - since < SETTLED_S:
            time.sleep(0.1)
            now = self.files()
            if now != before:
                before, since = now, time.monotonic()
        return before

    def empty(self, *tiers: str) -> None:
        for tier in tiers:
            store = open_store(self._urls[tier])
            try:
                keys = [found.key for found in store.scan(deadline_s=10)]
                if keys:
                    store.delete(keys, deadline_s=30)
            finally:
                store.close()

    def leave(self, tier: str) -> None:
        """Empties all tiers but this one."""
        self.empty(*(other for other in self._urls if other != tier))


class KvPair:
    def __init__(self, a: KvWorker, b: KvWorker, shared: Shared) -> None:
        self.a, self.b, self.shared = a, b, shared

    def compute_on_a(self, prompt: list[int], **more: object) -> tuple[set[Path], object]:
        """Lets A compute and save; answers the files that appeared, and the answer."""
        before, saved = self.shared.settled_files(), self.a.stats().get("saves_stored", 0)
        answered = self.a.complete(prompt, **more)
        self.a.wait_until_saved(saved + len(prompt) // CHUNK_TOKENS)
        return self.shared.files() - before, answered


def prompt_of(tokens: int, *, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(tokens)]


@pytest.fixture(scope="session")
def kv_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvPair]:
    folder = tmp_path_factory.mktemp("kv")
    servers, workers = (valkey(folder / "valkey"), seaweed(folder / "s3")), list[KvWorker]()
    try:
        for server in servers:
            server.start()
        engine = installed("medium")
        urls = {
            "valkey": f"valkey://127.0.0.1:{servers[0].port}/0",
            "folder": f"file://{folder}/shared",
            "s3": f"s3://kvrelay/run?endpoint=http://127.0.0.1:{servers[1].port}",
        }
        os.environ.update(CREDENTIALS)
        workers += _workers(engine, folder, urls)
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.wait_until_up()
            worker.wait_until_sharing()
        yield KvPair(workers[0], workers[1], Shared(servers[0], folder / "shared", urls))
    except (EngineUnavailable, ServerUnavailable) as reason:
        pytest.fail(f"the real engine cannot run here: {reason}", pytrace=False)
    finally:
        for worker in workers:
            worker.kill()
        for server in servers:
            server.kill()
        for name in CREDENTIALS:
            os.environ.pop(name, None)


def _workers(engine: Engine, folder: Path, urls: Mapping[str, str]) -> list[KvWorker]:
    ring, adapter = folder / "ring", folder / ADAPTER
    ring.write_text(f"k1 {'5a' * 32}\n")
    ring.chmod(0o600)
    script = Path(__file__).with_name("make_adapter.py")
    subprocess.run([str(engine.python), str(script), str(engine.model), str(adapter), "1"], check=True)
    store = {
        "tiers": [{"name": name, "url": url, "promote": "never"} for name, url in urls.items()],
        "keys": f"file:{ring}",
        "deadline_ms": 5000,
        "probe_interval_s": 0.5,
        "break_even": False,
    }
    connector = {"store": store, "chunk_tokens": CHUNK_TOKENS, "digest_cache": str(folder / "digests.json")}
    connector["lookup_deadline_ms"] = 5000  # other processes on the machine must not decide what is found
    return [
        KvWorker(
            engine,
            name,
            port=spare_port(),
            report_port=spare_port(),
            cpu=cpu % (os.cpu_count() or 1),
            folder=folder,
            connector=connector,
            adapters={ADAPTER: adapter},
            environment=CREDENTIALS,
        )
        for cpu, name in enumerate("ab")
    ]
