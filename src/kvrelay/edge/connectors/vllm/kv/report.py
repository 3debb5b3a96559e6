"""A small HTTP port beside the engine: what remote KV really did for a request, and the sums of it.

Streamed answers carry no KV parameters, so this is where a gateway learns the outcome of a streamed request:

    GET /loads/<id given in x-request-id>    the record, or 404
    GET /stats                               counters since the start
    GET /contract                            the contract, or why there is none
    GET /settings                            the engine's policy for failed loads, and the versions that work together
    GET /sharing, PUT /sharing {"on": false} whether KV is loaded and saved; off: neither, from now on

It answers on loopback only, and no web page: browsers say where a request comes from. Nothing in it quotes a prompt, a
salt or a key.
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
from kvrelay.edge.connectors.vllm.kv.switch import Switch

IDLE_S = 30.0
MAX_ORDER_BYTES = 1024


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """Body of PUT /sharing."""

    on: bool


class Stands(Protocol):
    def told(self) -> dict[str, object]: ...

    def told_in_full(self) -> dict[str, object]: ...


class ReportServer:
    def __init__(
        self, address: str, records: Records, standing: Stands, switch: Switch, *, settings: Mapping[str, object]
    ) -> None:
        """Raises SettingsError."""
        host, port = _loopback(address)
        told = {"records": records, "standing": standing, "settings": settings}
        handler = type("Handler", (_Handler,), {**told, "switch": switch})
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
    switch: Switch

    def do_GET(self) -> None:
        answer = self._answer(urllib.parse.unquote(self.path.partition("?")[0]))
        if answer is None:
            self._respond(404, {"error": "not found"})
        else:
            self._respond(200, answer)

    def do_PUT(self) -> None:
        order = self._order()
        if "Origin" in self.headers:
            self._respond(403, {"error": "requests from web pages are not answered"})
        elif self.path != "/sharing":
            self._respond(404, {"error": "not found"})
        elif order is None:
            self._respond(400, {"error": 'expected {"on": true} or {"on": false}'})
        else:
            self.switch.throw(order.on)
            self._respond(200, {"on": self.switch.on})

    def _order(self) -> Order | None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_ORDER_BYTES:
            self.close_connection = True  # what was not read is not the next request
            return None
        try:
            return msgspec.json.decode(self.rfile.read(int(length)), type=Order)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _respond(self, status: int, answer: object) -> None:
        body = msgspec.json.encode(answer)
        self.send_response(status)
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
        if path == "/sharing":
            return {"on": self.switch.on}
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
