"""Places for the service faults that need no server from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.file import FileStore
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.store import Store, StoreTimeout
from kvrelay.edge.stores.wrappers import Blackhole, Refusing
from tests.conformance.stores.service import PAYLOAD_BYTES

ROOM_BYTES = 4 * PAYLOAD_BYTES + 100_000


def clear(store: Store) -> None:
    store.delete([info.key for info in store.scan(deadline_s=5)], deadline_s=5)


class Memory:
    url = "memory://"

    def open(self) -> Store:
        return MemoryStore()

    def fill(self) -> Store:
        self._full = MemoryStore(capacity_bytes=ROOM_BYTES)
        return self._full

    def empty(self) -> None:
        clear(self._full)


class SharedMemory:
    def __init__(self) -> None:
        self.names = [f"faults-{os.getpid()}", f"faults-full-{os.getpid()}"]
        self.url = f"memory://{self.names[0]}"

    def open(self) -> Store:
        return open_store(self.url)

    def fill(self) -> Store:
        self._full = open_store(f"memory://{self.names[1]}", capacity_bytes=ROOM_BYTES)
        return self._full

    def empty(self) -> None:
        clear(self._full)

    def remove(self) -> None:
        for name in self.names:
            shutil.rmtree(f"/dev/shm/kvrelay-{os.getuid()}-{name}", ignore_errors=True)


class Pausing(Blackhole):
    """Silent while `swallows`: a call goes on when that ends, or is over with its deadline."""

    def _before(self, op: str, deadline_s: float) -> float:
        began_s = time.monotonic()
        while self.swallows:
            if time.monotonic() - began_s >= deadline_s:
                raise StoreTimeout("no answer")
            time.sleep(0.005)
        return max(0.001, deadline_s - (time.monotonic() - began_s))


class Directory:
    """A shared directory. What a network file system does when its server is silent or gone is played by wrappers: a
    process cannot make one of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.url = folder, f"file://{folder}"
        self._opened: list[tuple[Pausing, Refusing]] = []

    def open(self) -> Store:
        refusing = Refusing(open_store(self.url))
        hole = Pausing(refusing)
        refusing.refuses = hole.swallows = False
        self._opened.append((hole, refusing))
        return hole

    def stop(self) -> None:
        for hole, _ in self._opened:
            hole.swallows = True

    def go_on(self) -> None:
        for hole, _ in self._opened:
            hole.swallows = False

    def kill(self) -> None:
        for _, refusing in self._opened:
            refusing.refuses = True

    def restart(self) -> None:
        for _, refusing in self._opened:
            refusing.refuses = False

    def fill(self) -> Store:
        self._full = FileStore(self._folder / "full", capacity_bytes=ROOM_BYTES)
        return self._full

    def empty(self) -> None:
        clear(self._full)


class Peer:
    """`kvrelay store serve` in a process of its own, which can be stopped and killed."""

    def __init__(self, served: str = "memory://") -> None:
        self._port, self._served = 0, served
        self.restart()
        self.url = f"peer://127.0.0.1:{self._port}"

    def open(self) -> Store:
        return open_store(self.url)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def restart(self, *options: str) -> None:
        arguments = ["store", "serve", self._served, "--port", str(self._port), "--json", *options]
        command = [sys.executable, "-m", "kvrelay.cli.main", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self._port = int(json.loads(self._process.stdout.readline())["url"].rpartition(":")[2])

    def fill(self) -> Store:
        self.kill()
        self.restart("--bytes", str(ROOM_BYTES))
        self._full = self.open()
        return self._full

    def empty(self) -> None:
        clear(self._full)
