"""The data port: every path is proxied to a worker, but for the few that are the gateway's own."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

import msgspec

from kvrelay.edge.fleet.static import Fleet
from kvrelay.edge.gateway.auth import Tenants
from kvrelay.edge.gateway.forms import is_form
from kvrelay.edge.gateway.heads import read_head
from kvrelay.edge.gateway.openai import SCORED_PATHS
from kvrelay.edge.gateway.request import JSON, ClientRequest, Surroundings, error_body
from kvrelay.edge.http.exchange import Exchange
from kvrelay.edge.http.heads import Header, find
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.observe.receipt_log import ReceiptLog
from kvrelay.edge.system.sections import Limits


class DataPort:
    """Handler of the data port's server."""

    def __init__(
        self,
        around: Surroundings,
        fleet: Fleet,
        tenants: Tenants,
        receipts: ReceiptLog,
        metrics: Metrics,
        *,
        session_header: str,
        limits: Limits,
    ) -> None:
        self._fleet = fleet
        self._receipts = receipts
        self._metrics = metrics
        self.change(around, tenants, session_header=session_header, limits=limits)
        self._id_prefix = f"kvr-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)

    def change(self, around: Surroundings, tenants: Tenants, *, session_header: str, limits: Limits) -> None:
        """For requests that come from now on."""
        self._around = around
        self._tenants = tenants
        self._session_header = session_header.lower().encode("latin-1")
        self._body_bytes = limits.body_bytes
        self._hold_bytes = min(limits.hold_bytes, limits.body_bytes)

    def handle(self, exchange: Exchange) -> None:
        path = exchange.path
        if path == "/health":
            exchange.respond(200, (JSON,), b'{"status":"alive"}')
        elif path == "/ready":
            self._ready(exchange)
        else:
            self._proxy(exchange)

    def held_at_most(self, path: str, headers: Sequence[Header]) -> int | None:
        """How much of a body is read before it is routed; None: all of it, or it is refused.

        JSON is read whole, as far as that goes: its model decides who can take it. So is a body that a tenant's salt
        may go into, without exception: one that passed without it would meet the prefixes of others.
        """
        content_type = find(headers, b"content-type")
        tenant = self._tenants.of(find(headers, b"authorization"), find(headers, b"x-api-key"))
        salts = self._around.host.router.epochs.begun or (tenant is not None and tenant.salt is not None)
        if tenant is not None and salts and not is_form(content_type):
            return None
        if path.partition("?")[0] in SCORED_PATHS or (content_type is not None and b"json" in content_type.lower()):
            return self._body_bytes
        return self._hold_bytes

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
        if head.complaint is not None:
            exchange.respond(400, (JSON,), error_body(head.complaint, "invalid_request_error", 400))
            return
        if (tenant.salt is not None or self._around.host.router.epochs.begun) and head.encoded_body:
            # it would pass without the salt, and its prefix would meet those of others, or of a past epoch
            message = "this gateway must read the body, so it cannot be compressed (Content-Encoding)"
            exchange.respond(415, (JSON, (b"accept-encoding", b"identity")), error_body(message, "unsupported", 415))
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
