"""The admin port: what an operator, a dashboard or a check may ask of a running gateway, and change live."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from msgspec import Struct
from pydantic import ValidationError

from kvrelay.core.model.events import EpochRotated, PolicyChanged, RequestArrived, SessionClosed
from kvrelay.core.model.prompt import Tenant
from kvrelay.core.model.units import IndexState, Trigger
from kvrelay.core.policy.cache_load import CacheLoad
from kvrelay.core.policy.registry import POLICIES, SCORERS
from kvrelay.core.routing.status import WorkerStatus
from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.fleet.static import UnknownWorker, WorkerExists
from kvrelay.edge.fleet.view import WorkerView
from kvrelay.edge.gateway.auth import AdminToken
from kvrelay.edge.gateway.heads import SECOND_SESSION_HEADER
from kvrelay.edge.gateway.live_source import GatewaySource
from kvrelay.edge.gateway.openai import joined_salt, read_body
from kvrelay.edge.gateway.safety import UnsafeListener
from kvrelay.edge.gateway.scoring import prompt_at_once, prompt_in_time
from kvrelay.edge.gateway.sharing import Sharing, ask_all
from kvrelay.edge.observe.ui.app import Ui
from kvrelay.edge.system.config import Config, WorkerConfig
from kvrelay.edge.system.unreadable import UNREADABLE

if TYPE_CHECKING:
    from kvrelay.edge.gateway.gateway import Gateway

# What a caller may say of a new worker. Not `api_key_file`: it would let callers read files of this host.
WORKER_MEMBERS = frozenset(
    ("url", "name", "model", "events", "replay", "topic", "block_size", "agent", "adapter", "kv_report")
)
SECOND_HEADER = SECOND_SESSION_HEADER.decode()
MAX_RECEIPTS = 1000
CONFIG_PATH = "/process/config"
TASKS_PATH = "/process/tasks"
EPOCHS_PATH, ROTATE_PATH = "/admin/epochs", "/admin/epochs/rotate"
_DECIMAL = re.compile("[0-9]{1,9}")  # of what `isdigit` calls digits, `int` reads only some, and not too many of them
log = logging.getLogger(__name__)
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PUT /admin/policy."""

    policy: str
    scorer: str | None = None


class Rotation(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /admin/epochs/rotate."""

    trigger: Trigger
    tenant: str | None = None
    adapter: str | None = None
    keep: tuple[str, ...] = ()

    def event(self) -> EpochRotated:
        """Raises ValueError if the trigger and whom it concerns do not go together."""
        for name, trigger in (("tenant", Trigger.TENANT_POLICY), ("adapter", Trigger.ADAPTER)):
            given = getattr(self, name) is not None
            if given != (self.trigger is trigger):
                raise ValueError(f"`{name}` belongs to `{trigger}`" + ("" if given else ", which needs it"))
        return EpochRotated(self.trigger, self.tenant, self.adapter, self.keep)


class Admin:
    """The handlers; `app()` is what aiohttp serves."""

    def __init__(self, gateway: Gateway, token: AdminToken) -> None:
        self._gateway = gateway
        self.token = token
        self._ui = Ui(GatewaySource(gateway, self.status_value, self.workers_value))

    def app(self, max_body_bytes: int) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=max_body_bytes)
        if self._gateway.is_one_of_several:
            app.add_routes([web.put(CONFIG_PATH, self._take_config), web.post(TASKS_PATH, self._hand_over_tasks)])
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/admin/status", self._status),
                web.get("/admin/workers", self._workers),
                web.post("/admin/workers", self._add_worker),
                web.get("/admin/workers/{name}", self._worker),
                web.delete("/admin/workers/{name}", self._remove_worker),
                web.post("/admin/workers/{name}/{order:drain|resume|resync}", self._order_worker),
                web.post("/admin/workers/{name}/reset", self._reset_worker),
                web.get("/admin/policy", self._policy),
                web.put("/admin/policy", self._set_policy),
                web.get("/admin/sharing", self._sharing),
                web.put("/admin/sharing", self._set_sharing),
                web.post("/admin/match", self._match),
                web.get("/admin/receipts", self._receipts),
                web.get("/admin/receipts/{request_id}", self._receipt),
                web.get("/admin/sessions", self._sessions),
                web.delete("/admin/sessions/{session_id}", self._close_session),
                web.get(EPOCHS_PATH, self._epochs),
                web.post(ROTATE_PATH, self._rotate),
                *self._ui.routes(),
            ]
        )
        app.on_shutdown.append(self._ui.close)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Answer) -> web.StreamResponse:
        """Callers need the token if there is one. Browsers send `Origin`: no web page may reach a port on loopback."""
        if not admits_origin(request):
            return problem_response(403, "requests from other web pages are not answered")
        if not (self._ui.is_public(request) or self.token.admits(request.headers.get("Authorization"))):
            return problem_response(401, "the admin port wants its token (Authorization: Bearer TOKEN)")
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as problem:
            allowed = ", ".join(sorted(problem.allowed_methods))
            return problem_response(405, f"{problem.method} is not answered at `{request.path}`; legal: {allowed}")
        except web.HTTPException as problem:
            if problem is request.match_info.http_exception:
                return problem_response(problem.status, f"no such path: `{request.path}`; paths: {_paths(request.app)}")
            return problem_response(problem.status, problem.text or problem.reason)
        except UnknownWorker as problem:
            known = ", ".join(self._gateway.fleet.names()) or "none"
            return problem_response(404, f"no worker is called `{problem.args[0]}`; known: {known}")

    # --- state -------------------------------------------------------------------------------------------------------

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._gateway.metrics.render_for(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status(self, request: web.Request) -> web.Response:
        return _json(self.status_value())

    def status_value(self) -> dict[str, Any]:
        router = msgspec.to_builtins(self._gateway.status())
        described = {
            "gateway": self._gateway.describe(),
            "config": self._gateway.config_state,
            "tokens": self._gateway.describe_tokens(),
            "event_sockets": msgspec.to_builtins(self._gateway.fleet.shared_event_sockets()),
        }
        return {**router, **described}

    async def _workers(self, request: web.Request) -> web.Response:
        return _json(self.workers_value())

    def workers_value(self) -> dict[str, Any]:
        known = self._known_workers()
        return {"workers": [self._worker_of(view, known) for view in self._gateway.fleet.views()]}

    async def _worker(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return _json(self._worker_of(self._gateway.fleet.view(name), self._known_workers()))

    def _worker_of(self, view: WorkerView, known: Mapping[str, WorkerStatus]) -> dict[str, Any]:
        return _worker(view, known.get(view.name), draining=self._gateway.fleet.drained(view.name))

    def _known_workers(self) -> dict[str, WorkerStatus]:
        return {worker.name: worker for worker in self._gateway.status().workers}

    # --- changes -----------------------------------------------------------------------------------------------------

    async def _add_worker(self, request: web.Request) -> web.Response:
        members = await _object(request)
        unknown = sorted(set(members) - WORKER_MEMBERS)
        if unknown:
            return problem_response(400, f"unknown member `{unknown[0]}`; known: {', '.join(sorted(WORKER_MEMBERS))}")
        try:
            worker = WorkerConfig.model_validate(members)
            await self._gateway.fleet.add(worker)
        except ValidationError as problem:
            first = problem.errors(include_url=False)[0]
            return problem_response(400, f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}")
        except WorkerExists as problem:
            return problem_response(409, f"that name or URL is taken: {problem}")
        return _json(self._worker_of(self._gateway.fleet.view(worker.name), {}), status=201)

    async def _remove_worker(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self._gateway.fleet.remove(name)
        return _json({"removed": name})

    async def _order_worker(self, request: web.Request) -> web.Response:
        name, order = request.match_info["name"], request.match_info["order"]
        fleet = self._gateway.fleet
        {"drain": fleet.drain, "resume": fleet.resume, "resync": fleet.resync}[order](name)
        return _json({"worker": name, "done": order})

    async def _reset_worker(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            await self._gateway.fleet.reset(name)
        except (WorkerUnreachable, WorkerAnswerUnusable) as problem:
            return problem_response(502, f"`{name}` kept its cache: {problem}")
        return _json({"worker": name, "done": "reset"})

    async def _sharing(self, request: web.Request) -> web.Response:
        return _json(await ask_all(self._gateway.fleet, None))

    async def _set_sharing(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=Sharing)
        except UNREADABLE as problem:
            return problem_response(400, f'expected {{"on": true}} or {{"on": false}}: {problem}')
        return _json(await ask_all(self._gateway.fleet, wanted.on))

    async def _policy(self, request: web.Request) -> web.Response:
        status = self._gateway.status()
        return _json({"policy": status.policy, "scorer": status.scorer, "known": POLICIES, "known_scorers": SCORERS})

    async def _set_policy(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=Policy)
        except UNREADABLE as problem:
            return problem_response(400, f'expected {{"policy": NAME}} and perhaps "scorer": {problem}')
        if wanted.policy not in POLICIES:
            return problem_response(400, f"unknown policy `{wanted.policy}`; known: {', '.join(POLICIES)}")
        if wanted.scorer is not None and wanted.scorer not in SCORERS:
            return problem_response(400, f"unknown scorer `{wanted.scorer}`; known: {', '.join(SCORERS)}")
        in_name_only = self._why_not(wanted.policy)
        if in_name_only is not None:
            return problem_response(409, in_name_only)
        self._gateway.host.feed(PolicyChanged(wanted.policy, wanted.scorer))
        return await self._policy(request)

    def _why_not(self, policy: str) -> str | None:
        """A policy that matches prompts is refused where nothing can match: it would be one in name only."""
        targets = [target for worker in self._gateway.status().workers for target in worker.targets]
        if policy != CacheLoad.name or not targets:
            return None
        if any(target.index_state is not IndexState.UNUSABLE for target in targets):
            return None
        return f"`{policy}` needs an index, and of no worker anything can match: {targets[0].index_problem}"

    async def _take_config(self, request: web.Request) -> web.Response:
        """From the group, which has read and checked it; reached through a private socket only."""
        try:
            needs_restart = await self._gateway.reload(Config.model_validate_json(await request.read()))
        except (UnsafeListener, OSError, ValueError) as problem:
            return problem_response(400, str(problem))
        return _json({"needs_restart": needs_restart})

    async def _hand_over_tasks(self, request: web.Request) -> web.Response:
        """To the group, which follows sessions over all its processes; none of it is kept here."""
        return _json(self._gateway.tasks.take_all())

    # --- requests and sessions ---------------------------------------------------------------------------------------

    async def _match(self, request: web.Request) -> web.Response:
        """What would happen to this request body; nothing is dispatched. `?path=` says which path it is meant for."""
        raw = await request.read()
        default = "/v1/chat/completions" if b'"messages"' in raw else "/v1/completions"
        path = request.query.get("path", default)
        body = read_body(path, raw)
        host, tokens = self._gateway.host, self._gateway.tokens
        adapter, tenant = host.router.adapter_of(body.model), Tenant()
        epoch = host.router.epochs.tag(tenant.name, adapter)
        tenant_salt = host.router.epochs.salted(tenant, epoch).salt
        salt = body.cache_salt if tenant_salt is None else joined_salt(tenant_salt, body.cache_salt)
        prompt = prompt_at_once(host.router, tokens, body, adapter, salt)
        if prompt is None:
            prompt = await prompt_in_time(host.router, tokens, body, salt)
        arrived = RequestArrived(
            request_id="match",
            prompt=prompt,
            model=body.model,
            adapter=adapter,
            session_id=request.headers.get(self._gateway.config.affinity.header, request.headers.get(SECOND_HEADER)),
            tenant=tenant,
            path=path,
            epoch=epoch,
            draw=self._gateway.draw(),
        )
        return _json(host.router.match(host.clock(), arrived))

    async def _receipts(self, request: web.Request) -> web.Response:
        asked = request.query.get("limit", "100")
        limit = int(asked) if _DECIMAL.fullmatch(asked) else 0
        if not 1 <= limit <= MAX_RECEIPTS:
            return problem_response(400, f"`limit` is `{asked}`; legal: 1 to {MAX_RECEIPTS}")
        return _json({"receipts": self._gateway.receipts.recent(limit)})

    async def _receipt(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        receipt = self._gateway.receipts.get(request_id)
        if receipt is None:
            return problem_response(
                404, f"no receipt of `{request_id}` among the last ones; older ones are in the file"
            )
        return _json(receipt)

    async def _sessions(self, request: web.Request) -> web.Response:
        sessions = [
            {
                "session_id": key.session_id,
                "tenant": key.tenant,
                "worker": home.worker.name,
                "incarnation": home.worker.incarnation,
                "rank": home.rank,
            }
            for key, home in self._gateway.host.router.sessions().items()
        ]
        return _json({"sessions": sessions})

    async def _close_session(self, request: web.Request) -> web.Response:
        session_id = request.match_info["session_id"]
        tenant = request.query.get("tenant")
        host = self._gateway.host
        if not host.router.has_session(host.clock(), session_id, tenant):
            of = "" if tenant is None else f" of tenant `{tenant}`"
            return problem_response(404, f"no session `{session_id}`{of} is bound or has a turn under way")
        host.feed(SessionClosed(session_id, tenant))
        return _json({"closed": session_id})

    # --- epochs ------------------------------------------------------------------------------------------------------

    async def _epochs(self, request: web.Request) -> web.Response:
        return _json(self._epochs_of(()))

    async def _rotate(self, request: web.Request) -> web.Response:
        """Done when this is answered: who arrives from now on meets no KV from before."""
        try:
            event = msgspec.json.decode(await request.read(), type=Rotation).event()
        except (*UNREADABLE, ValueError) as problem:
            legal = ", ".join(Trigger)
            return problem_response(400, f'expected {{"trigger": NAME}}, one of {legal}: {problem}')
        unknown = [name for name in event.keep if name not in self._gateway.fleet.names()]
        if unknown:
            raise UnknownWorker(unknown[0])
        if not self._gateway.router.left_by(event) and self._gateway.status().workers:
            hint = "start workers of the new kind first and name them in `keep`"
            return problem_response(
                409, f"no worker would be left to take requests after a new {event.trigger}: {hint}"
            )
        before = self._gateway.router.epochs.state
        self._gateway.host.feed(event)
        try:
            self._gateway.keep_epochs()
        except OSError as problem:  # it is in force, which is the safe side; after a restart it would not be
            log.error("epochs_not_kept: %s", problem)
        return _json(self._epochs_of(before.retired))

    def _epochs_of(self, retired_before: Collection[str]) -> dict[str, Any]:
        state = self._gateway.router.epochs.state
        return {
            **msgspec.to_builtins(state),
            "retired_now": [name for name in state.retired if name not in retired_before],
            "kept_in": None if self._gateway.config.gateway.epochs_file is None else "epochs_file",
        }


def admits_origin(request: web.Request) -> bool:
    """Browsers send `Origin`: no web page but our own may reach a port on loopback."""
    return "Origin" not in request.headers or request.headers["Origin"].partition("://")[2] == request.host


def _paths(app: web.Application) -> str:
    return ", ".join(dict.fromkeys(resource.canonical for resource in app.router.resources()))


def _worker(view: WorkerView, status: WorkerStatus | None, *, draining: bool) -> dict[str, Any]:
    """What the fleet sees and what the router believes, side by side; without the worker's key."""
    return {
        "name": view.name,
        "url": view.url,
        "engine": view.engine,
        "version": view.version,
        "incarnation": view.worker.incarnation if view.worker is not None else None,
        "routable": status.routable if status is not None else False,
        "standing": status.standing if status is not None else None,
        "draining": draining,
        "last_probe": {"ok": view.last_probe_ok, "detail": view.last_probe_detail},
        "event_sources": [
            {"rank": source.rank, "endpoint": source.endpoint, "topic": source.topic, "bind": source.bind}
            for source in view.sources
        ],
        "malformed_events": view.malformed_messages,
        "events_problem": view.events_problem,
        "agent": None if view.agent is None else msgspec.to_builtins(view.agent, str_keys=True),
        "router": None if status is None else msgspec.to_builtins(status),
    }


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        return msgspec.json.decode(await request.read(), type=dict[str, Any])
    except UNREADABLE as problem:
        raise web.HTTPBadRequest(text=f"the body is not a JSON object: {problem}") from problem


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def problem_response(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "code": status}}, status=status)
