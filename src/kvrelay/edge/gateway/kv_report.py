"""Asks the KV connector inside a worker what it really loaded for one streamed request."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from kvrelay.core.model.units import Fault
from kvrelay.edge.http.client import CallTimeouts, Origin, UpstreamPool
from kvrelay.edge.http.heads import Header

# The client has its whole answer already; only the receipt waits, and a port that hangs must not keep requests open.
TIMEOUTS = CallTimeouts(connect_s=0.2, first_byte_s=0.2, idle_s=0.2)


class KvReportQuestion:
    """One question. `then` is called once, with the report or with nothing."""

    def __init__(self, then: Callable[[bytes | None], None]) -> None:
        self._then = then
        self._status = 0
        self._body = b""

    def ask(self, pool: UpstreamPool, origin: Origin, request_id: str) -> None:
        target = f"/loads/{quote(request_id, safe='')}"
        head = f"GET {target} HTTP/1.1\r\nhost: {origin.host}:{origin.port}\r\naccept: application/json\r\n\r\n"
        pool.request(origin, head.encode("latin-1"), self, TIMEOUTS)

    def on_accepted(self) -> None:
        """Nothing to note."""

    def on_interim(self, status: int, headers: list[Header]) -> None:
        """Nothing to note."""

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._body += data

    def on_end(self) -> None:
        self._then(self._body if self._status == 200 else None)

    def on_error(self, fault: Fault, detail: str) -> None:
        self._then(None)
