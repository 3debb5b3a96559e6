"""One worker as we see it: who it is, whether it lives, and how loaded it is.

A worker is asked who it is when it is new and whenever another process may have taken its place:

- a probe was refused and a later one is answered;
- the start time on its metrics page changed;
- its event stream was connected anew, began again, or has a gap that is to be replayed.

Its KV events wait meanwhile (`EventFeed`), so that a new incarnation is announced to the router before the first of
its events.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import msgspec
import zmq

from kvrelay.core.model.effects import RequestReplay, RequestSnapshot
from kvrelay.core.model.events import EventsHeard, LoadReported, ProbeAnswered, SnapshotUnavailable, WorkerJoined
from kvrelay.core.model.ids import WorkerId
from kvrelay.edge.connectors.base import (
    Connector,
    Description,
    EventSource,
    Scrape,
    WorkerAnswerUnusable,
    WorkerUnreachable,
)
from kvrelay.edge.connectors.registry import CONNECTORS, detect
from kvrelay.edge.fleet.agent_link import AgentLink
from kvrelay.edge.fleet.event_feed import EventFeed
from kvrelay.edge.fleet.sessions import TlsSession
from kvrelay.edge.fleet.silence import EventSilence
from kvrelay.edge.fleet.surroundings import Surroundings
from kvrelay.edge.fleet.view import Access, Upstream, WorkerView
from kvrelay.edge.system.config import WorkerConfig
from kvrelay.edge.system.places import place_of_worker

JITTER = 0.2  # of the interval, so that many workers are not probed in step
IDENTITY_TIMEOUT_S = 1.0
_SILENCE = "silence"

_log = logging.getLogger(__name__)


class WorkerWatch:
    """Lives from `start()` to `stop()`; all its tasks and sockets end there."""

    def __init__(self, config: WorkerConfig, access: Access, around: Surroundings) -> None:
        self.config = config
        self._access = access
        self._around = around
        self._connector: Connector | None = CONNECTORS.get(config.adapter)
        self.upstream: Upstream | None = None  # None until the worker has answered for the first time
        self._description: Description | None = None
        self._worker: WorkerId | None = None
        self._lives = 0
        self._streams = 0  # that began within the life which the worker states
        self._doubtful = False  # a new process may have taken its place
        self._asking = asyncio.Lock()
        self._events = EventFeed(config.name, around, on_doubt=self._doubt_by_event, spawn=self._spawn)
        self._last_probe_ok: bool | None = None
        self._last_probe_detail = "not probed yet"
        self._last_scrape: Scrape | None = None
        self._silence = EventSilence()
        self._refused: str | None = None  # why we do not listen where it publishes
        self._events_problem_said: str | None = None
        self._agent: AgentLink | None = None
        self._tls_session = TlsSession()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def session(self) -> aiohttp.ClientSession:
        """For questions to this worker; not to be kept, as another one may take its place."""
        shared, tls = self._around.session, self._access.tls
        return shared if tls is None else self._tls_session.get(shared.timeout.total, tls)

    # --- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._agent = self._agent_link()
        self._spawn(self._every_interval(self._probe))
        self._spawn(self._every_interval(self._scrape))

    @property
    def was_probed(self) -> bool:
        return self._last_probe_ok is not None

    def change_access(self, access: Access) -> None:
        """Its key or its authorities were changed; for requests and questions from now on."""
        if access.headers == self._access.headers and access.tls is self._access.tls:
            return
        self._access = access
        if self.upstream is not None:
            self.upstream = msgspec.structs.replace(self.upstream, headers=access.headers, tls=access.tls)

    def halt(self) -> None:
        """Nothing is fed after this; what still runs is on its way out."""
        self._events.close()
        if self._agent is not None:
            self._agent.close()
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Halts, and waits until everything has ended."""
        self.halt()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tls_session.close()

    def replay(self, effect: RequestReplay) -> None:
        """Starts the replay; the answer is fed as ReplayArrived or ReplayUnavailable."""
        self._spawn(self._replay(effect))

    async def reset(self) -> None:
        """Has the worker drop its cache. Raises WorkerUnreachable or WorkerAnswerUnusable."""
        if self._connector is None:
            raise WorkerUnreachable("it has not said yet what it is", refused=False)
        await self._connector.reset(self.session, self.config.url, self._access.headers)

    async def sharing(self, on: bool | None) -> bool | None:
        """See `Connector.sharing`. Raises WorkerUnreachable or WorkerAnswerUnusable."""
        if self._connector is None:
            raise WorkerUnreachable("it has not said yet what it is", refused=False)
        config = self.config
        return await self._connector.sharing(
            self.session, config.url, self._access.headers, kv_report=config.kv_report, on=on
        )

    def snapshot(self, effect: RequestSnapshot) -> None:
        """Asks the agent; the answer is fed as SnapshotArrived or SnapshotUnavailable."""
        if self._agent is None:
            self._around.feed(SnapshotUnavailable(effect.worker, effect.rank, "the worker has no agent"))
        else:
            self._spawn(self._agent.snapshot(effect))

    def view(self) -> WorkerView:
        description = self._description
        return WorkerView(
            name=self.config.name,
            url=self.config.url,
            headers=self._access.headers,
            worker=self._worker,
            connector=self._connector,
            spec=description.spec if description else None,
            version=description.version if description else None,
            engine=description.spec.engine if description else "unknown",
            last_probe_ok=self._last_probe_ok,
            last_probe_detail=self._last_probe_detail,
            sources=self._events.sources,
            last_seq=dict(self._events.last_seq),
            held_messages=self._events.held_messages,
            malformed_messages=self._events.malformed_messages,
            last_scrape=self._last_scrape,
            events_problem=self._events_problem,
            tells_lives=self._tells_lives,
            agent=None if self._agent is None else self._agent.view(),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            context = {"message": f"watching worker {self.config.name} failed", "exception": task.exception()}
            task.get_loop().call_exception_handler(context)

    async def _every_interval(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await work()
            await asyncio.sleep(self._around.interval_s * random.uniform(1 - JITTER, 1 + JITTER))

    # --- who it is ---------------------------------------------------------------------------------------------

    async def _describe(self) -> None:
        """Asks the worker and announces it when it is a process not seen before. Raises what the connector raises."""
        async with self._asking:
            session = self.session
            if self._connector is None:
                self._connector = await detect(session, self.config.url, self._access.headers)
            description = await self._connector.describe(session, self.config.url, self._access.headers)
            if not self._around.shares:
                await self._order_off()
            self._refused = why_sources_are_refused(description.sources, self.config)
            self._adopt(_as_configured(description, self.config), self._connector)
            self._doubtful = False
            self._events.resume()

    async def _order_off(self) -> None:
        """A life that begins behind the order knows nothing of it, and is told before it gets a request."""
        try:
            await self.sharing(False)
        except (WorkerUnreachable, WorkerAnswerUnusable) as problem:
            _log.warning("worker_may_share worker=%s: it is to leave shared tiers alone: %s", self.config.name, problem)

    def _adopt(self, description: Description, connector: Connector) -> None:
        worker = WorkerId(self.config.name, self._incarnation(description))
        is_new = worker != self._worker
        self._worker, self._description = worker, description
        if self.upstream is None:
            access = self._access
            self.upstream = Upstream(self.config.url, access.headers, connector, access.tls, self.config.kv_report)
        self._events.attach(worker, connector, description.sources, tells_lives=self._tells_lives)
        if is_new:
            self._silence, self._events_problem_said = EventSilence(), None
            self._introduce(description)
            self._around.feed(WorkerJoined(worker, description.spec))
        self._tell_events_problem()

    @property
    def _tells_lives(self) -> bool:
        return self._description is not None and self._description.incarnation is not None

    def _agent_link(self) -> AgentLink | None:
        endpoint = self.config.agent
        if not endpoint:
            return None
        try:
            link = AgentLink(self.config.name, endpoint, self._around, worker=lambda: (self._worker, self._tells_lives))
        except zmq.ZMQError as error:
            _log.error("no agent of worker %s at %s: %s", self.config.name, endpoint, error)
            return None
        self._spawn(link.run())
        return link

    def _introduce(self, description: Description) -> None:
        about = f"worker={self.config.name} engine={description.spec.engine} version={description.version or 'unknown'}"
        if description.sources:
            endpoints = ",".join(source.endpoint for source in description.sources)
            _log.info("worker_described %s events=%s", about, endpoints)
        else:
            _log.warning("worker_without_events %s: what it holds is guessed from what it was sent", about)

    def _incarnation(self, description: Description) -> str:
        """A worker that cannot tell its lives apart is a new one after each doubt: too many lives cost hits only."""
        if description.incarnation is not None:
            return self._with_stream(description.incarnation)
        if self._worker is None or self._doubtful:
            self._lives += 1
        return f"life-{self._lives}"

    def _with_stream(self, stated: str) -> str:
        """A process that goes on, with an engine that was started again: its cache is as new as another life's."""
        before = self._description.incarnation if self._description is not None else None
        if stated != before:
            self._streams = 0
        elif self._events.began_again:
            self._streams += 1
        return f"{stated}+{self._streams}" if self._streams else stated

    def _doubt(self) -> None:
        self._doubtful = True
        self._events.pause()

    def _doubt_by_event(self) -> None:
        self._doubt()
        self._spawn(self._ask_again())

    async def _ask_again(self) -> None:
        try:
            async with asyncio.timeout(IDENTITY_TIMEOUT_S):
                await self._describe()
        except (TimeoutError, WorkerUnreachable, WorkerAnswerUnusable):
            return  # a doubt stays a doubt: the next answered probe asks again

    async def _replay(self, effect: RequestReplay) -> None:
        """A gap may be the restart itself: a new process would answer with its own history under the old name."""
        if effect.from_seq > 0:
            await self._ask_again()
        await self._events.replay(effect)
        self._tell_events_problem()

    # --- whether it lives, and its load ------------------------------------------------------------------------

    async def _probe(self) -> None:
        if self._agent is not None:
            self._agent.tell_problem()
        try:
            if self._worker is None:
                await self._describe()
            assert self._connector is not None
            complaint = await self._connector.probe(self.session, self.config.url, self._access.headers)
            if complaint is None and self._doubtful:
                await self._describe()
        except WorkerUnreachable as error:
            if error.refused and self._worker is not None:
                self._doubt()
            complaint = str(error)
        except WorkerAnswerUnusable as error:
            complaint = str(error)
        self._probed(complaint)

    def _probed(self, complaint: str | None) -> None:
        if self._worker is None and complaint != self._last_probe_detail:  # of the others the router tells
            again = f"asked again every {self._around.interval_s:g} s"
            _log.warning("worker_silent worker=%s url=%s: %s; %s", self.config.name, self.config.url, complaint, again)
        self._last_probe_ok = complaint is None
        self._last_probe_detail = complaint or ""
        if self._worker is not None:
            self._around.feed(ProbeAnswered(self._worker, complaint is None, complaint or ""))

    async def _scrape(self) -> None:
        if self._worker is None or self._connector is None:
            return
        try:
            scrape = await self._connector.scrape(self.session, self.config.url, self._access.headers)
            if scrape is None:
                return
            if self._is_of_another_process(scrape):
                self._doubt()
                await self._describe()
        except (WorkerUnreachable, WorkerAnswerUnusable):
            return  # the probe reports it
        self._last_scrape = scrape
        self._report_load(self._worker, scrape)
        self._listen(scrape)

    def _listen(self, scrape: Scrape) -> None:
        if self._events.sources:
            self._silence.observe(scrape, heard=bool(self._events.last_seq))
            if self._silence.worth_a_look():
                self._spawn(self._events.look_again())
        self._tell_events_problem()

    @property
    def _events_problem(self) -> str | None:
        return self._refused or self._events.problem or self._silence.problem

    def _tell_events_problem(self) -> None:
        """When it begins, ends, or is known for certain. How much was computed in silence changes and is no news."""
        certain = self._refused or self._events.problem
        kind = certain or (_SILENCE if self._silence.problem is not None else None)
        if kind == self._events_problem_said or self._worker is None:
            return
        self._events_problem_said = kind
        problem = certain or self._silence.problem
        self._around.feed(EventsHeard(self._worker, problem))
        if problem is not None:
            _log.warning("events_silent worker=%s: %s", self.config.name, problem)

    def _report_load(self, worker: WorkerId, scrape: Scrape) -> None:
        for rank, load in scrape.ranks.items():
            self._around.feed(
                LoadReported(
                    worker,
                    rank,
                    running_requests=load.running_requests,
                    waiting_requests=load.waiting_requests,
                    kv_usage_ratio=load.kv_usage_ratio,
                )
            )

    def _is_of_another_process(self, scrape: Scrape) -> bool:
        before = self._description.process_start_s if self._description else None
        return None not in (before, scrape.process_start_s) and before != scrape.process_start_s


def why_sources_are_refused(found: tuple[EventSource, ...], config: WorkerConfig) -> str | None:
    """Why not all that a worker says of its sources is used; None if it is."""
    beyond = [source.endpoint for source in found if _listens_beyond_loopback(source)]
    return _why_refused(beyond[0]) if beyond and config.events == "auto" else None


def _why_refused(endpoint: str) -> str:
    return f'it publishes to {endpoint}, beyond loopback; `events = "bind:{endpoint}"` says that we shall listen there'


def _listens_beyond_loopback(source: EventSource) -> bool:
    host = source.endpoint.removeprefix("tcp://").rpartition(":")[0]
    return source.bind and source.endpoint.startswith("tcp://") and not host.startswith(("127.", "localhost", "[::1]"))


def _as_configured(description: Description, config: WorkerConfig) -> Description:
    """What the operator stated about a worker goes over what it says of itself."""
    sources = configured_sources(description.sources, config)
    spec = msgspec.structs.replace(
        description.spec,
        models=(config.model,) if config.model else description.spec.models,
        role=config.role,
        max_active_requests=config.max_active_requests or None,
        place=place_of_worker(config),
        block_size_tokens=config.block_size or description.spec.block_size_tokens,
        sends_events=bool(sources),
        has_agent=bool(config.agent),
    )
    return msgspec.structs.replace(description, spec=spec, sources=sources)


def configured_sources(found: tuple[EventSource, ...], config: WorkerConfig) -> tuple[EventSource, ...]:
    """Where its events are taken from: what the operator stated, else what the worker says.

    Nothing is listened on beyond loopback because a worker says so: that takes an `events` of the operator.
    """
    if config.events == "none":
        return ()
    if config.events == "auto":
        found = tuple(source for source in found if not _listens_beyond_loopback(source))
    else:
        endpoint = config.events.removeprefix("bind:")
        own = found[0] if found else EventSource(rank=0, endpoint=endpoint)
        bind = endpoint != config.events or (own.bind and own.endpoint == endpoint)
        found = (msgspec.structs.replace(own, endpoint=endpoint, bind=bind),)
    if config.replay != "auto":
        replay_endpoint = None if config.replay == "none" else config.replay
        found = tuple(msgspec.structs.replace(source, replay=replay_endpoint) for source in found)
    if config.topic:
        found = tuple(msgspec.structs.replace(source, topic=config.topic) for source in found)
    return found
