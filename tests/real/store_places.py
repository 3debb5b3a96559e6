"""Real servers as places for the service faults of `tests/conformance/stores`.

How each is filled: a Valkey by its own limit on memory; Mooncake by a new master with one client, whose segment is
small; SeaweedFS by the kernel, which lets its process write no file beyond some length, as a quota would.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.store import Store
from tests.conformance.stores.service import PAYLOAD_BYTES
from tests.real.store_servers import Server, command

S = 5.0


class ServedPlace:
    """`servers` are stopped, killed and started together. `fill` and `empty` are per kind of server."""

    def __init__(
        self,
        url: str,
        servers: Sequence[Server],
        *,
        set_full: Callable[[bool], None] = lambda full: None,
        full_url: str | None = None,
    ) -> None:
        self.url, self._full_url = url, full_url or url
        self._servers, self._set_full = servers, set_full

    def open(self) -> Store:
        return open_store(self.url, deadline_s=S)

    def stop(self) -> None:
        for server in self._servers:
            server.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        for server in self._servers:
            server.signal(signal.SIGCONT)

    def kill(self) -> None:
        for server in self._servers:
            server.kill()

    def restart(self) -> None:
        for server in self._servers:
            server.start()

    def fill(self) -> Store:
        self._set_full(True)
        return open_store(self._full_url, deadline_s=S)

    def empty(self) -> None:
        self._set_full(False)


def limit_valkeys(servers: Sequence[Server]) -> Callable[[bool], None]:
    """Room for about four objects, or any number."""

    def set_full(full: bool) -> None:
        for server in servers:
            used = next(
                int(line.partition(b":")[2])
                for line in command(server.port, "INFO", "memory").split(b"\r\n")
                if line.startswith(b"used_memory:")
            )
            limit = used + 4 * PAYLOAD_BYTES // len(servers) if full else 0
            command(server.port, "CONFIG", "SET", "maxmemory", str(limit))

    return set_full


def begin_anew(server: Server) -> Callable[[bool], None]:
    """A server that has only what comes from now on."""

    def set_full(full: bool) -> None:
        if full:
            server.kill()
            server.start()

    return set_full


def limit_files(server: Server, folder: Path) -> Callable[[bool], None]:
    """No file below `folder` may become longer than about one object more than the longest is now."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_full(full: bool) -> None:
        longest = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        limit = longest + PAYLOAD_BYTES if full else most
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (limit, most))

    return set_full
