"""The data port: every path is proxied to a worker, but for the few that are the gateway's own."""

from __future__ import annotations

import itertools
import secrets

import msgspec

from kvrelay.edge.fleet.static import Fleet
from kvrelay.edge.gateway.auth import Tenants
from kvrelay.edge.gateway.heads import read_head
from kvrelay.edge.gateway.request import JSON, ClientRequest, Surroundings, error_body
from kvrelay.edge.http.exchange import Exchange
from kvrelay.edge.http.heads import Header
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.observe.receipt_log import ReceiptLog


class DataPort:
    """Handler of the data port's server."""

    def __init__(
        self,
        around: Surroundings,
        fleet: Fleet,
        tenants: Tenants,
        receipts: ReceiptLog,
        metrics: Metrics,
        session_header: str,
    ) -> None:
        self._fleet = fleet
        self._receipts = receipts
        self._metrics = metrics
        self.change(around, tenants, session_header)
        self._id_prefix = f"kvr-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)

    def change(self, around: Surroundings, tenants: Tenants, session_header: str) -> None:
        """For requests that come from now on."""
        self._around = around
        self._tenants = tenants
        self._session_header = session_header.lower().encode("latin-1")

    def handle(self, exchange: Exchange) -> None:
        path = exchange.path
        if path == "/health":
            exchange.respond(200, (JSON,), b'{"status":"alive"}')
        elif path == "/ready":
            self._ready(exchange)
        else:
            self._proxy(exchange)

    def _ready(self, exchange: Exchange) -> None:
        if self._around.host.router.draining:
            exchange.respond(503, (JSON,), b'{"status":"draining"}')
        elif self._around.host.router.ready(self._around.host.clock()):
            exchange.respond(200, (JSON,), b'{"status":"ready"}')
        else:
            exchange.respond(503, (JSON,), b'{"status":"no_worker_routable"}')

    def _proxy(self, exchange: Exchange) -> None:
        head = read_head(exchange.headers, self._session_header)
        tenant = self._tenants.of(head.authorization, head.api_key)
        if tenant is None:
            self._metrics.unauthorized.add(())
            challenge: Header = (b"www-authenticate", b"Bearer")
            message = "a valid API key is needed (Authorization: Bearer KEY, or x-api-key: KEY)"
            body = error_body(message, "authentication_error", 401)
            exchange.respond(401, (JSON, challenge), body)
            return
        if exchange.path == "/v1/models" and exchange.method == "GET":
            merged = self._merged_models()
            if merged is not None:
                exchange.respond(200, (JSON,), merged)
                return
        ClientRequest(self._around, exchange, head, self._request_id(head.request_id), tenant).begin()

    def _request_id(self, asked: str | None) -> str:
        """The client's own id, unless it is in use or was used just now: receipts are found by it."""
        number = next(self._numbers)
        if asked is None:
            return f"{self._id_prefix}-{number:x}"
        if asked in self._around.host.requests or asked in self._receipts:
            return f"{asked}~{number:x}"
        return asked

    def _merged_models(self) -> bytes | None:
        """One list for workers that serve different models; None if any worker's own answer says it all."""
        served = [view.spec for view in self._fleet.views() if view.spec is not None]
        if len({(spec.models, spec.adapters) for spec in served}) <= 1:
            return None
        models: dict[str, dict[str, str]] = {}
        for spec in served:
            for name in (*spec.models, *spec.adapters):
                models.setdefault(name, {"id": name, "object": "model", "owned_by": "kvrelay"})
        return msgspec.json.encode({"object": "list", "data": list(models.values())})
