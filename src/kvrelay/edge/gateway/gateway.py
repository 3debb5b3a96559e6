"""The gateway as a whole: router, fleet, data port and admin port, started and ended together.

async with Gateway(load_config("kvrelay.toml")) as gateway:
    gateway.url, gateway.admin_url
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import ssl
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from msgspec.structs import replace

from kvrelay import __version__
from kvrelay.core.model.effects import RequestReplay, RequestSnapshot
from kvrelay.core.model.events import DrainStarted, Event, PolicyChanged, SettingsChanged, WorkerJoined
from kvrelay.core.receipts.tasks import TaskLedger
from kvrelay.core.routing.epochs import EpochState
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.core.routing.status import RouterStatus
from kvrelay.edge.fleet.static import Fleet
from kvrelay.edge.gateway.admin import Admin
from kvrelay.edge.gateway.app import DataPort
from kvrelay.edge.gateway.auth import AdminToken, Tenants
from kvrelay.edge.gateway.epochs_file import read_epochs, write_epochs
from kvrelay.edge.gateway.heads import Route, make_route
from kvrelay.edge.gateway.host import RouterHost
from kvrelay.edge.gateway.place import Place
from kvrelay.edge.gateway.request import Surroundings
from kvrelay.edge.gateway.safety import UnsafeListener, refuse_unsafe_listeners
from kvrelay.edge.http.client import CallTimeouts, UpstreamPool
from kvrelay.edge.http.limits import HttpLimits
from kvrelay.edge.http.server import HttpServer, start_server
from kvrelay.edge.observe.fleet_gauges import costs_of
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.observe.receipt_log import LineWriter, ReceiptLog, receipt_file
from kvrelay.edge.observe.task_counts import MAX_OPEN_TASKS, TaskCounts
from kvrelay.edge.observe.tracing.tracing import Tracing, tracing_of
from kvrelay.edge.system.clock import monotonic_s, wall_ns, wall_s
from kvrelay.edge.system.config import Config, router_settings, run_digest
from kvrelay.edge.system.config_change import first_state, takes_effect
from kvrelay.edge.tokens.parity import Parity, describe_tokens
from kvrelay.edge.tokens.service import TokenService
from kvrelay.edge.tokens.worker import WorkerTokenizer

DRAIN_RETRY_AFTER_S = 5.0
log = logging.getLogger(__name__)

__all__ = ["Gateway", "UnsafeListener", "admin_token", "authority", "load_certificate", "refuse_unsafe_listeners"]


class Gateway:
    """Valid between `start()` and `stop()`. A fixed `seed` and `key_seed` make its choices repeatable."""

    def __init__(
        self,
        config: Config,
        *,
        seed: int | None = None,
        key_seed: bytes | None = None,
        manifest_digest: str | None = None,
        place: Place | None = None,
    ) -> None:
        self.config = config
        self._place = place
        self.seed = secrets.randbits(63) if seed is None else seed
        self._key_seed = secrets.token_bytes(32) if key_seed is None else key_seed
        self._given_digest = manifest_digest
        self._manifest_digest = self._digest(config)
        self._fingerprint_secret = secrets.token_bytes(32) if place is None else place.fingerprint_secret
        self.config_state = first_state()
        self._random = random.Random(self.seed if place is None else f"{self.seed}/{place.process}")
        self._routes: dict[str, Route] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_at = 0.0
        self._server: HttpServer | None = None
        self._admin: web.AppRunner | None = None
        self._admin_api: Admin
        self._tls: ssl.SSLContext | None = None
        self.host: RouterHost
        self.fleet: Fleet
        self.tokens: TokenService
        self._parity: Parity | None = None
        self.metrics: Metrics
        self.tasks: TaskLedger
        self.receipts: ReceiptLog
        self._tracing: Tracing | None = None
        self._pool: UpstreamPool
        self._port: DataPort

    # --- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Raises UnsafeListener, OSError (a port or a file) or ValueError (a tokenizer) and leaves nothing open."""
        refuse_unsafe_listeners(self.config)
        tenants = self._tenants(self.config)
        token = admin_token(self.config.gateway.admin_token_file)
        self._started_at = monotonic_s()
        self._compose(tenants, self._epochs())
        try:
            await self.fleet.start()
            self._take_over_standing()
            await self._listen(token)
        except BaseException:
            await self.stop()
            raise

    async def reload(self, wanted: Config) -> tuple[str, ...]:
        """Takes what of `wanted` can change while running, or nothing of it.

        Open requests go on as they began. Returns the keys that differ and wait for the next start. Raises what `start`
        raises, or WorkerClash (a ValueError); then everything is as before.
        """
        config, needs_restart = takes_effect(self.config, wanted)
        refuse_unsafe_listeners(config)
        tenants = self._tenants(config)
        token = admin_token(config.gateway.admin_token_file)
        fleet = self.fleet.plan_change(config)
        if self._tls is not None:
            load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)  # a bad one must not touch ours
            load_certificate(self._tls, config)
        # nothing from here on fails
        self.config = config
        self._manifest_digest = self._digest(config)
        if self._place is None:
            self._admin_api.token = token
        assert self._server is not None
        self._server.change_limits(_http_limits(config))
        self._port.change(
            self._surroundings(tenants),
            tenants,
            session_header=config.affinity.header,
            limits=config.gateway.limits,
        )
        self.host.feed(SettingsChanged(self._router_settings()))
        await self.fleet.change(fleet)
        self.config_state.taken(needs_restart)
        return needs_restart

    async def drain(self) -> int:
        """Not ready from now on; open requests may end within the configured grace, then they are cut.

        Returns how many were cut.
        """
        self.host.feed(DrainStarted(DRAIN_RETRY_AFTER_S))
        assert self._server is not None
        if await self._server.drain(self.config.gateway.drain.grace_s):
            return 0
        return self.host.cut("drain_grace_over")

    def leave_port(self) -> None:
        """New connections go to the siblings from now on, which is better than to be refused here."""
        if self._server is not None:
            self._server.leave_port()

    async def cut_short(self) -> int:
        """Ends all open requests now; answers how many."""
        return self.host.cut("gateway_stopped")

    async def stop(self) -> None:
        """Ends everything; open requests are cut and still get their receipts. May be called again."""
        if self._server is not None:
            self.host.cut("gateway_stopped")
            await self._server.let_last_answers_leave()
            await self._server.close()
            self._server = None
        if self._admin is not None:
            await self._admin.cleanup()
            self._admin = None
        await self._end_tasks()
        self._pool.close()
        await self.fleet.stop()
        await self._end_tasks()  # a worker may have joined in the last moment
        self.tokens.close()
        self.host.close()
        self.receipts.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
            self._tracing = None

    # --- what it says of itself --------------------------------------------------------------------------------------

    @property
    def router(self) -> Router:
        return self.host.router

    @property
    def url(self) -> str:
        assert self._server is not None
        scheme = "https" if self.config.gateway.tls_cert is not None else "http"
        return f"{scheme}://{authority(self.config.gateway.host)}:{self._server.port}"

    @property
    def admin_url(self) -> str:
        assert self._admin is not None
        return f"http://{authority(self.config.gateway.admin_host)}:{self._admin.addresses[0][1]}"

    @property
    def is_one_of_several(self) -> bool:
        return self._place is not None

    def status(self) -> RouterStatus:
        return self.router.status(self.host.clock())

    def describe(self) -> dict[str, Any]:
        """The gateway's own part of /admin/status."""
        return {
            "version": __version__,
            "pid": os.getpid(),
            "url": self.url,
            "uptime_s": round(monotonic_s() - self._started_at, 1),
            "draining": self.router.draining,
            "client_connections": 0 if self._server is None else len(self._server.connections),
            "open_requests": len(self.host.requests),
            "open_upstream_calls": self._pool.open_calls,
            "receipts_dropped": self.receipts.dropped,
            "seed": self.seed,
            "manifest_digest": self._manifest_digest,
        }

    def describe_tokens(self) -> dict[str, Any]:
        return describe_tokens(self.tokens.tokenizer, self._parity)

    def draw(self) -> int:
        """The chance of one request."""
        return self._random.getrandbits(64)

    # --- putting it together -----------------------------------------------------------------------------------------

    def _compose(self, tenants: Tenants, epochs: EpochState) -> None:
        config = self.config
        idle_s = config.observe.task_idle_s
        self.tasks = TaskLedger(idle_s=idle_s, max_open=MAX_OPEN_TASKS)
        self.metrics = Metrics(tasks=self.tasks)
        if self._place is None:
            self.metrics.bind_tasks(TaskCounts(self.tasks), lambda: monotonic_s() * 1e3)
        self.receipts = ReceiptLog(self._receipt_writer())
        self._tracing = tracing_of(
            config.tracing,
            version=__version__,
            now_ms=lambda: monotonic_s() * 1e3,
            wall_ns=wall_ns,
            chance=random.Random(secrets.randbits(64)),
        )
        self.host = RouterHost(
            Router(self._router_settings(), epochs),
            clock=monotonic_s,
            metrics=self.metrics,
            receipts=self.receipts,
            replay=self._replay,
            snapshot=self._snapshot,
            share=None if self._place is None else self._place.share,
            tracing=self._tracing,
        )
        workers = None if self._place is None else self._place.workers
        self.fleet = Fleet(config, feed=self._hear, clock=monotonic_s, observer=self.metrics, workers=workers)
        self.metrics.bind(self.status, lambda: [view.name for view in self.fleet.views()])
        self.metrics.bind_fleet(self.fleet.views, lambda: costs_of(self.config))
        self.tokens = self._tokens()
        self._pool = UpstreamPool()
        self._port = DataPort(
            self._surroundings(tenants),
            self.fleet,
            tenants,
            self.receipts,
            self.metrics,
            session_header=config.affinity.header,
            limits=config.gateway.limits,
        )

    def _router_settings(self) -> RouterSettings:
        settings = router_settings(self.config, key_seed=self._key_seed, manifest_digest=self._manifest_digest)
        return replace(settings, has_siblings=self._place is not None)

    def _receipt_writer(self) -> LineWriter | None:
        receipts = self.config.receipts
        if self._place is not None:
            return self._place.receipts
        if receipts.path is None:
            return None
        return receipt_file(receipts.path, rotate_mb=receipts.rotate_mb, keep=receipts.keep)

    def _take_over_standing(self) -> None:
        """What an operator changed since the configuration was read, before this process began."""
        place = self._place
        if place is None:
            return
        if place.policy is not None:
            self.host.feed(PolicyChanged(place.policy, place.scorer))
        for name in place.drained:
            self.fleet.drain(name)

    def _digest(self, config: Config) -> str:
        return self._given_digest or run_digest(config, version=__version__, seed=self.seed)

    def _epochs(self) -> EpochState:
        if self._place is not None:
            return self._place.epochs
        file = self.config.gateway.epochs_file
        return EpochState() if file is None else read_epochs(file)

    def keep_epochs(self) -> None:
        """Writes down what a restart must not forget; where there are several processes, the group does. OSError."""
        file = self.config.gateway.epochs_file
        if file is not None and self._place is None:
            write_epochs(file, self.router.epochs.state)

    def _tenants(self, config: Config) -> Tenants:
        return Tenants(config.tenants, secret=self._fingerprint_secret)

    def _surroundings(self, tenants: Tenants) -> Surroundings:
        timeouts = self.config.gateway.timeouts
        return Surroundings(
            host=self.host,
            pool=self._pool,
            tokens=self.tokens,
            route_of=self._route_of,
            timeouts=CallTimeouts(timeouts.connect_s, timeouts.first_byte_s, timeouts.idle_s),
            total_s=timeouts.total_s,
            draw=self.draw,
            forwards_credentials=not tenants.keys_required,
            migrates=self.config.retry.migrate,
            tracing=self._tracing,
            spawn=self._spawn,
        )

    def _tokens(self) -> TokenService:
        cache_bytes = self.config.tokens.cache_mb * 2**20
        if self.config.tokens.tokenizer is None:
            return TokenService(WorkerTokenizer(self.fleet), cache_bytes=cache_bytes)
        from kvrelay.edge.tokens.local import local_tokenizer  # needs what only the `tokens` extra installs

        tokenizer = local_tokenizer(self.config.tokens, cache_bytes=cache_bytes // 2)
        self._parity = Parity(tokenizer, self.fleet)
        self.metrics.bind_tokens(tokenizer.lookups)
        return TokenService(tokenizer, cache_bytes=cache_bytes // 2)

    def _hear(self, event: Event) -> None:
        """What the fleet says goes to the router; a new worker's tokenizer is compared with ours besides."""
        self.host.feed(event)
        if isinstance(event, WorkerJoined):
            self.metrics.worker_joined(event.worker.name, wall_s())
            if self._parity is not None:
                self._spawn(self._parity.check(event.worker.name))

    def _replay(self, effect: RequestReplay) -> None:
        self.fleet.replay(effect)  # host and fleet need each other; the fleet is made second

    def _snapshot(self, effect: RequestSnapshot) -> None:
        self.fleet.snapshot(effect)

    def _route_of(self, name: str) -> Route:
        upstream = self.fleet.upstream(name)
        route = self._routes.get(name)
        if route is None or route.upstream is not upstream:
            route = self._routes[name] = make_route(name, upstream)
        return route

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_tasks(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, token: AdminToken) -> None:
        gateway = self.config.gateway
        if gateway.tls_cert is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            load_certificate(self._tls, self.config)
        if self._place is not None:
            await self._listen_as(self._place)
            return
        self._server = await start_server(
            self._port.handle,
            host=gateway.host,
            port=gateway.port,
            limits=_http_limits(self.config),
            ssl=self._tls,
            held_at_most=self._port.held_at_most,
        )
        runner = await self._run_admin(token)
        await web.TCPSite(runner, gateway.admin_host, gateway.admin_port).start()

    async def _listen_as(self, place: Place) -> None:
        """One of several: asked by the group only, and by clients not before it has seen the workers, since its
        siblings can serve meanwhile."""
        runner = await self._run_admin(AdminToken(None))
        await web.UnixSite(runner, place.admin_socket).start()
        await self.fleet.settled(place.settle_s)
        self._server = await start_server(
            self._port.handle,
            host=self.config.gateway.host,
            port=place.port,
            limits=_http_limits(self.config),
            ssl=self._tls,
            reuse_port=True,
        )

    async def _run_admin(self, token: AdminToken) -> web.AppRunner:
        self._admin_api = Admin(self, token)
        app = self._admin_api.app(self.config.gateway.limits.body_bytes)
        self._admin = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._admin.setup()
        return self._admin


def admin_token(file: Path | None) -> AdminToken:
    return AdminToken(None if file is None else file.read_text(encoding="utf-8").strip())


def _http_limits(config: Config) -> HttpLimits:
    limits = config.gateway.limits
    return HttpLimits(
        header_bytes=limits.header_bytes,
        body_bytes=limits.body_bytes,
        streamed_body_bytes=limits.streamed_body_bytes,
    )


def load_certificate(context: ssl.SSLContext, config: Config) -> None:
    """Into a context that may be in use: connections that are made from now on get it."""
    assert config.gateway.tls_cert is not None and config.gateway.tls_key is not None, "the configuration has both"
    files = config.gateway.tls_cert, config.gateway.tls_key
    for file in files:
        file.open("rb").close()  # ssl would not say which of the two it cannot read
    try:
        context.load_cert_chain(*files)
    except ssl.SSLError as problem:
        raise ValueError(f"{files[0]} and {files[1]} are no certificate and its key (PEM): {problem}") from problem


def authority(host: str) -> str:
    return f"[{host}]" if ":" in host else host
