"""A small HTTP port beside the engine: what remote KV really did for a request, and the sums of it.

Streamed answers carry no KV parameters, so this is where a gateway learns the outcome of a streamed request:

    GET /loads/<id given in x-request-id>    the record, or 404
    GET /stats                               counters since the start
    GET /contract                            the contract, or why there is none
    GET /settings                            the engine's policy for failed loads, and the versions that work together

It answers on loopback only. Nothing in it quotes a prompt, a salt or a key.
"""

from __future__ import annotations

import ipaddress
import threading
import urllib.parse
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

import msgspec

from kvrelay.edge.connectors.vllm.kv.records import Records
from kvrelay.edge.connectors.vllm.kv.settings import SettingsError

IDLE_S = 30.0


class Stands(Protocol):
    def told(self) -> dict[str, object]: ...

    def told_in_full(self) -> dict[str, object]: ...


class ReportServer:
    def __init__(self, address: str, records: Records, standing: Stands, *, settings: Mapping[str, object]) -> None:
        """Raises SettingsError."""
        host, port = _loopback(address)
        handler = type("Handler", (_Handler,), {"records": records, "standing": standing, "settings": settings})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as fault:
            raise SettingsError(f"`report` {address}: {fault.strerror}") from fault
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="kvrelay-report", daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    records: Records
    standing: Stands
    settings: Mapping[str, object]

    def do_GET(self) -> None:
        answer = self._answer(urllib.parse.unquote(self.path.partition("?")[0]))
        body = msgspec.json.encode({"error": "not found"} if answer is None else answer)
        self.send_response(404 if answer is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, path: str) -> object | None:
        if path.startswith("/loads/"):
            record = self.records.find(path.removeprefix("/loads/"))
            return None if record is None else {**record.told(), **self.standing.told()}
        if path == "/stats":
            return self.records.totals()
        if path == "/contract":
            return self.standing.told_in_full()
        if path == "/settings":
            return self.settings
        return None

    def log_message(self, format: str, *args: object) -> None:
        """One line per request would drown the engine's own."""


def _loopback(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        if host == "localhost":
            host = "127.0.0.1"
        if not ipaddress.ip_address(host).is_loopback:
            raise SettingsError(f"`report` is {address}: it has no credentials, so it listens on loopback only")
        return host, int(port)
    except ValueError:
        raise SettingsError(f"`report` is {address!r}: it must be HOST:PORT, as in 127.0.0.1:7101") from None
