"""The fleet as the operator stated it: workers from the configuration, and those added or removed while running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import zmq
from msgspec import Struct

from kvrelay.core.model.effects import RequestReplay, RequestSnapshot
from kvrelay.core.model.events import (
    Event,
    ReplayUnavailable,
    ResidencyReset,
    SnapshotUnavailable,
    WorkerDrained,
    WorkerLeft,
    WorkerResumed,
)
from kvrelay.edge.fleet.change import FleetChange, fleet_change
from kvrelay.edge.fleet.event_sockets import EventSockets, SharedSocketView
from kvrelay.edge.fleet.observer import FleetObserver, NoObserver
from kvrelay.edge.fleet.sessions import question_session
from kvrelay.edge.fleet.surroundings import Surroundings
from kvrelay.edge.fleet.view import Access, Upstream, WorkerView
from kvrelay.edge.fleet.watch import WorkerWatch
from kvrelay.edge.http.tls import client_context
from kvrelay.edge.system.config import Config, WorkerConfig

SETTLE_POLL_S = 0.02


class UnknownWorker(LookupError):
    """No worker of that name is in the fleet."""


class WorkerExists(Exception):
    """The name or the URL is taken by another worker."""


class PlannedChange(Struct, frozen=True):
    """A change of the fleet that cannot fail any more. Holds the workers' keys: never log it."""

    settings: Config
    workers: FleetChange
    access: Mapping[str, Access]


class Fleet:
    """Feeds the router with everything that the workers say. `feed` is called in the event loop only."""

    def __init__(
        self,
        settings: Config,
        *,
        feed: Callable[[Event], None],
        clock: Callable[[], float],
        observer: FleetObserver | None = None,
        workers: Sequence[WorkerConfig] | None = None,
    ) -> None:
        """It begins with `workers`, or with those that the settings name."""
        self._settings = settings
        self._at_start = settings.workers if workers is None else workers
        self._feed = feed
        self._clock = clock
        self._observer = observer or NoObserver()
        self._watches: dict[str, WorkerWatch] = {}
        self._drained: dict[str, None] = {}
        self._old_sessions: list[aiohttp.ClientSession] = []
        self._around: Surroundings | None = None

    async def start(self) -> None:
        """Begins to watch the configured workers; they may come later than this."""
        health = self._settings.health
        sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._around = Surroundings(
            session=question_session(health.timeout_s),
            sockets=sockets,
            event_sockets=EventSockets(sockets, self._observer),
            feed=self._feed,
            clock=self._clock,
            observer=self._observer,
            interval_s=health.interval_s,
        )
        for worker in self._at_start:
            await self.add(worker)

    async def stop(self) -> None:
        """Ends every task and socket; may be called again."""
        await asyncio.gather(*(watch.stop() for watch in self._watches.values()))
        self._watches.clear()
        if self._around is not None:
            for session in (*self._old_sessions, self._around.session):
                await session.close()
            self._old_sessions.clear()
            self._around.sockets.destroy(linger=0)
            self._around = None

    def plan_change(self, settings: Config) -> PlannedChange:
        """What `change` will do, with everything in it that can fail.

        Raises WorkerClash, OSError for a file, or ValueError for a CA file that is none.
        """
        running = {watch.config.name: watch.config for watch in self._watches.values()}
        change = fleet_change(self._settings.workers, settings.workers, running)
        access = {worker.name: worker_access(worker) for worker in (*change.added, *change.kept)}
        return PlannedChange(settings, change, access)

    async def change(self, planned: PlannedChange) -> None:
        """Requests that run on a removed or changed worker go on; drained workers stay drained."""
        self._change_health(planned.settings)
        self._settings = planned.settings
        for name in planned.workers.removed:
            drained = name in self._drained
            await self.remove(name)
            if drained and name in planned.access:
                self._drained[name] = None
                self._feed(WorkerDrained(name))
        for worker in planned.workers.kept:
            self._watch(worker.name).change_access(planned.access[worker.name])
        for worker in planned.workers.added:
            self._add(worker, planned.access[worker.name])

    def _change_health(self, settings: Config) -> None:
        assert self._around is not None, "start() comes first"
        health = settings.health
        self._around.interval_s = health.interval_s
        if health.timeout_s != self._settings.health.timeout_s:
            self._old_sessions.append(self._around.session)  # questions under way still need it
            self._around.session = question_session(health.timeout_s)

    async def settled(self, within_s: float) -> bool:
        """Whether every worker has been asked once and has answered or failed, within that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not all(watch.was_probed for watch in self._watches.values()):  # noqa: ASYNC110  rare and short
                    await asyncio.sleep(SETTLE_POLL_S)
                return True
        return False

    async def add(self, worker: WorkerConfig) -> None:
        """Raises WorkerExists, OSError when a file of its cannot be read, ValueError when its CA file is none."""
        assert self._around is not None, "start() comes first"
        for known in self._watches.values():
            if worker.name == known.config.name or worker.url == known.config.url:
                raise WorkerExists(f"{known.config.name} at {known.config.url}")
        self._add(worker, worker_access(worker))

    def _add(self, worker: WorkerConfig, access: Access) -> None:
        assert self._around is not None
        watch = self._watches[worker.name] = WorkerWatch(worker, access, self._around)
        watch.start()

    async def remove(self, name: str) -> None:
        """The router forgets it before we do, so that no request is sent to a worker without an address."""
        watch = self._watch(name)
        watch.halt()
        self._feed(WorkerLeft(name))
        self._drained.pop(name, None)
        del self._watches[name]
        self._observer.forget_worker(name)
        await watch.stop()

    def drain(self, name: str) -> None:
        """No new requests for the worker; the running ones go on."""
        self._drained[self._watch(name).config.name] = None
        self._feed(WorkerDrained(name))

    def resume(self, name: str) -> None:
        self._drained.pop(self._watch(name).config.name, None)
        self._feed(WorkerResumed(name))

    def drained(self, name: str) -> bool:
        """Whether an operator wants it drained, also if it has not answered yet."""
        return name in self._drained

    def resync(self, name: str) -> None:
        """Forget what is known of its cache and ask for its history."""
        self._feed(ResidencyReset(self._watch(name).config.name, replay=True))

    async def reset(self, name: str) -> None:
        """Has the worker drop its cache, and forgets what was known of it at the same moment.

        Raises UnknownWorker, or what the connector raises; nothing is forgotten then.
        """
        await self._watch(name).reset()
        self._feed(ResidencyReset(name))

    async def sharing(self, name: str, *, on: bool | None) -> bool | None:
        """Has the worker use shared tiers or leave them alone; `on` None only asks. Answers what holds now; None: it
        has none. Raises UnknownWorker, or what the connector raises.

        An order holds for those that join or start anew after it as well."""
        if on is not None and self._around is not None:
            self._around.shares = on
        return await self._watch(name).sharing(on)

    def replay(self, effect: RequestReplay) -> None:
        """Answered later by feeding ReplayArrived or ReplayUnavailable; never waits."""
        watch = self._watches.get(effect.worker.name)
        if watch is None:
            self._feed(ReplayUnavailable(effect.worker, effect.rank, "the worker left"))
        else:
            watch.replay(effect)

    def snapshot(self, effect: RequestSnapshot) -> None:
        """Answered later by feeding SnapshotArrived or SnapshotUnavailable; never waits."""
        watch = self._watches.get(effect.worker.name)
        if watch is None:
            self._feed(SnapshotUnavailable(effect.worker, effect.rank, "the worker left"))
        else:
            watch.snapshot(effect)

    def upstream(self, name: str) -> Upstream:
        """Where requests for the worker go; cheap, made once. Only for workers that were fed as WorkerJoined."""
        upstream = self._watch(name).upstream
        assert upstream is not None, name
        return upstream

    def session_of(self, name: str) -> aiohttp.ClientSession:
        """For questions to this worker, such as `tokenize`, with its TLS settings; lives as long as it is here."""
        return self._watch(name).session

    def view(self, name: str) -> WorkerView:
        return self._watch(name).view()

    def shared_event_sockets(self) -> list[SharedSocketView]:
        """Sockets that workers connect to, and what came in there that belongs to nobody."""
        return [] if self._around is None else self._around.event_sockets.views()

    def names(self) -> tuple[str, ...]:
        """Of all workers, also of those that have not answered yet."""
        return tuple(self._watches)

    def views(self) -> list[WorkerView]:
        return [watch.view() for watch in self._watches.values()]

    def _watch(self, name: str) -> WorkerWatch:
        try:
            return self._watches[name]
        except KeyError:
            raise UnknownWorker(name) from None


def worker_access(worker: WorkerConfig) -> Access:
    """Raises OSError when a file of its cannot be read, ValueError when its CA file is none."""
    tls = client_context(worker.ca_file, verify=worker.tls_verify) if worker.url.startswith("https://") else None
    return Access(worker_headers(worker.api_key_file), tls)


def worker_headers(api_key_file: Path | None) -> Mapping[str, str]:
    if api_key_file is None:
        return {}
    return {"authorization": f"Bearer {api_key_file.read_text(encoding='utf-8').strip()}"}
