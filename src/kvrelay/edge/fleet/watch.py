"""One worker as we see it: what it is, whether it lives, how loaded it is, and its stream of KV events.

The difficulty is restarts. Nothing in an event message names the process that sent it, and sequence numbers begin at 0
again. So every batch is attributed to the incarnation that was known when it came, and these three signs of a new
process hold the following batches back until the worker has been asked who it is now:

- a probe was refused and a later one was answered;
- the start time on its metrics page changed;
- a sequence number did not grow.

The new incarnation is announced to the router before the first of the held batches. A restart that shows none of the
signs in time leaves a gap in the sequence: the router keeps what follows aside and asks for a replay, and
before any replay of a gap the worker is asked who it is as well.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec
import zmq
from msgspec import Struct

from kvrelay.core.model.effects import RequestReplay
from kvrelay.core.model.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventsSkipped,
    KvBatch,
    KvEvent,
    LoadReported,
    ProbeAnswered,
    ReplayArrived,
    ReplayUnavailable,
    WorkerJoined,
    WorkerSpec,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.edge.connectors.base import (
    Connector,
    DecodedBatch,
    Description,
    EventSource,
    MalformedEvents,
    Scrape,
    WorkerAnswerUnusable,
    WorkerUnreachable,
)
from kvrelay.edge.connectors.registry import CONNECTORS, detect
from kvrelay.edge.connectors.vllm.replay import NoReplay, replay
from kvrelay.edge.connectors.vllm.subscriber import EventSubscriber
from kvrelay.edge.fleet.observer import FleetObserver
from kvrelay.edge.system.config import WorkerConfig

JITTER = 0.2  # of the interval, so that many workers are not probed in step
MAX_HELD_MESSAGES = 10_000
REPLAY_TIMEOUT_S = 5.0
IDENTITY_TIMEOUT_S = 1.0
REPLAY_MESSAGES_PER_TURN = 32
QUIET_AFTER_CHECK_S = 1.0

_log = logging.getLogger(__name__)


class WorkerView(Struct, frozen=True):
    """What is known of a worker at this moment. `worker` is None until it has answered for the first time."""

    name: str
    url: str
    headers: Mapping[str, str]  # to be sent with every request to it; holds its key, so never log it
    worker: WorkerId | None
    connector: Connector | None
    spec: WorkerSpec | None
    version: str | None
    engine: str
    last_probe_ok: bool | None
    last_probe_detail: str
    sources: tuple[EventSource, ...]
    last_seq: Mapping[int, int]
    held_messages: int
    malformed_messages: int
    last_scrape: Scrape | None


class Upstream(Struct, frozen=True):
    """What is needed to send a request to a worker."""

    url: str
    headers: Mapping[str, str]  # holds the worker's key: never log it
    connector: Connector


class Surroundings(NamedTuple):
    """What all workers of a fleet share."""

    session: aiohttp.ClientSession
    sockets: zmq.Context[zmq.Socket[bytes]]
    feed: Callable[[Event], None]
    clock: Callable[[], float]
    observer: FleetObserver
    interval_s: float


class _Message(NamedTuple):
    seq: int
    payload: bytes


class WorkerWatch:
    """Lives from `start()` to `stop()`; all its tasks and sockets end there."""

    def __init__(self, config: WorkerConfig, headers: Mapping[str, str], around: Surroundings) -> None:
        self.config = config
        self._headers = headers
        self._around = around
        self._connector: Connector | None = CONNECTORS.get(config.adapter)
        self.upstream: Upstream | None = None  # None until the worker has answered for the first time
        self._description: Description | None = None
        self._worker: WorkerId | None = None
        self._lives = 0
        self._doubtful = False  # a new process may have taken its place
        self._asking = asyncio.Lock()
        self._checked_at_s = float("-inf")
        self._last_probe_ok: bool | None = None
        self._last_probe_detail = "not probed yet"
        self._last_scrape: Scrape | None = None
        self._subscribers: dict[EventSource, EventSubscriber] = {}
        self._last_seq: dict[int, int] = {}
        self._held: deque[_Message] = deque()
        self._malformed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._spawn(self._every_interval(self._probe))
        self._spawn(self._every_interval(self._scrape))

    def halt(self) -> None:
        """Nothing is fed after this; what still runs is on its way out."""
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._subscribers.clear()
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Halts, and waits until everything has ended."""
        self.halt()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def view(self) -> WorkerView:
        description = self._description
        return WorkerView(
            name=self.config.name,
            url=self.config.url,
            headers=self._headers,
            worker=self._worker,
            connector=self._connector,
            spec=description.spec if description else None,
            version=description.version if description else None,
            engine=description.spec.engine if description else "unknown",
            last_probe_ok=self._last_probe_ok,
            last_probe_detail=self._last_probe_detail,
            sources=tuple(self._subscribers),
            last_seq=dict(self._last_seq),
            held_messages=len(self._held),
            malformed_messages=self._malformed,
            last_scrape=self._last_scrape,
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
            session = self._around.session
            if self._connector is None:
                self._connector = await detect(session, self.config.url, self._headers)
            description = await self._connector.describe(session, self.config.url, self._headers)
            self._checked_at_s = self._around.clock()
            self._adopt(_as_configured(description, self.config))
            self._doubtful = False
            self._release_held()

    def _adopt(self, description: Description) -> None:
        known = self._description
        worker = WorkerId(self.config.name, self._incarnation(description))
        self._description = description
        assert self._connector is not None
        self.upstream = self.upstream or Upstream(self.config.url, self._headers, self._connector)
        if worker == self._worker and known is not None and known.spec == description.spec:
            return
        if worker != self._worker:
            self._last_seq.clear()
        self._worker = worker
        self._subscribe(description.sources)
        self._around.feed(WorkerJoined(worker, description.spec))

    def _incarnation(self, description: Description) -> str:
        if description.incarnation is not None:
            return description.incarnation
        if self._worker is None or self._doubtful:
            self._lives += 1
        return f"life-{self._lives}"

    # --- whether it lives, and its load ------------------------------------------------------------------------

    async def _probe(self) -> None:
        try:
            if self._worker is None:
                await self._describe()
            assert self._connector is not None
            complaint = await self._connector.probe(self._around.session, self.config.url, self._headers)
            if complaint is None and self._doubtful:
                await self._describe()
        except WorkerUnreachable as error:
            self._doubtful = self._doubtful or error.refused
            complaint = str(error)
        except WorkerAnswerUnusable as error:
            complaint = str(error)
        self._probed(complaint)

    def _probed(self, complaint: str | None) -> None:
        self._last_probe_ok = complaint is None
        self._last_probe_detail = complaint or ""
        if self._worker is not None:
            self._around.feed(ProbeAnswered(self._worker, complaint is None, complaint or ""))

    async def _scrape(self) -> None:
        if self._worker is None or self._connector is None:
            return
        try:
            scrape = await self._connector.scrape(self._around.session, self.config.url, self._headers)
            if scrape is None:
                return
            if self._is_of_another_process(scrape):
                self._doubtful = True
                await self._describe()
        except (WorkerUnreachable, WorkerAnswerUnusable):
            return  # the probe reports it
        self._last_scrape = scrape
        for rank, load in scrape.ranks.items():
            self._around.feed(
                LoadReported(
                    self._worker,
                    rank,
                    running_requests=load.running_requests,
                    waiting_requests=load.waiting_requests,
                    kv_usage_ratio=load.kv_usage_ratio,
                )
            )

    def _is_of_another_process(self, scrape: Scrape) -> bool:
        before = self._description.process_start_s if self._description else None
        return None not in (before, scrape.process_start_s) and before != scrape.process_start_s

    # --- its events --------------------------------------------------------------------------------------------

    def _subscribe(self, sources: tuple[EventSource, ...]) -> None:
        """Sockets whose source stays are kept: they reconnect by themselves, and a new one would miss messages."""
        for source in tuple(self._subscribers):
            if source not in sources:
                self._subscribers.pop(source).close()
        for source in sources:
            if source not in self._subscribers:
                try:
                    subscriber = EventSubscriber(self._around.sockets, source, self._on_message, self._on_malformed)
                except zmq.ZMQError as error:
                    _log.error("no events of worker %s from %s: %s", self.config.name, source.endpoint, error)
                    continue
                self._subscribers[source] = subscriber

    def _on_message(self, seq: int, payload: bytes) -> None:
        if self._doubtful:
            self._hold(_Message(seq, payload))
            return
        batch = self._decoded(payload)
        if batch is None:
            return
        if self._shows_restart(seq, batch.rank):
            self._doubtful = True
            self._hold(_Message(seq, payload))
            self._spawn(self._check_identity())
            return
        self._publish(seq, batch)

    def _shows_restart(self, seq: int, rank: int) -> bool:
        """A sequence that begins again always does. A late or repeated batch might, and is asked about now and then,
        but only of workers that can tell one life from the next."""
        last_seq = self._last_seq.get(rank)
        if last_seq is None or seq > last_seq:
            return False
        if seq == 0:
            return True
        tells_lives = self._description is not None and self._description.incarnation is not None
        return tells_lives and self._around.clock() - self._checked_at_s > QUIET_AFTER_CHECK_S

    async def _check_identity(self) -> None:
        try:
            await self._describe()
        except (WorkerUnreachable, WorkerAnswerUnusable):
            return  # still doubtful: the next answered probe asks again

    def _hold(self, message: _Message) -> None:
        if len(self._held) >= MAX_HELD_MESSAGES:
            self._held.popleft()  # the hole shows in the sequence and is replayed
        self._held.append(message)

    def _release_held(self) -> None:
        held, self._held = self._held, deque()
        for message in held:
            batch = self._decoded(message.payload)
            if batch is not None:
                self._publish(message.seq, batch)

    def _publish(self, seq: int, batch: DecodedBatch) -> None:
        assert self._worker is not None
        self._last_seq[batch.rank] = max(seq, self._last_seq.get(batch.rank, seq))
        self._around.observer.count_events(self.config.name, _kinds(batch.events))
        self._around.feed(KvBatch(self._worker, batch.rank, seq, batch.events))

    def _decoded(self, payload: bytes) -> DecodedBatch | None:
        assert self._connector is not None
        try:
            return self._connector.decode_events(payload)
        except MalformedEvents as error:
            self._on_malformed(str(error))
            return None

    def _on_malformed(self, reason: str) -> None:
        self._malformed += 1
        self._around.observer.count_malformed(self.config.name)
        if self._malformed == 1 or self._malformed % 1000 == 0:
            _log.warning("malformed events from %s: %s; count=%d", self.config.name, reason, self._malformed)

    # --- replay ------------------------------------------------------------------------------------------------

    def replay(self, effect: RequestReplay) -> None:
        """Starts the replay; the answer is fed as ReplayArrived or ReplayUnavailable."""
        self._spawn(self._replay(effect))

    async def _check_identity_before_replay(self) -> None:
        """A gap may be the restart itself: the new process would answer with its own history under the old name."""
        try:
            async with asyncio.timeout(IDENTITY_TIMEOUT_S):
                await self._describe()
        except (TimeoutError, WorkerUnreachable, WorkerAnswerUnusable):
            return  # cannot be told now; the scrape will

    async def _replay(self, effect: RequestReplay) -> None:
        endpoint = next((source.replay for source in self._subscribers if source.rank == effect.rank), None)
        if endpoint is None:
            self._around.feed(ReplayUnavailable(effect.worker, effect.rank, "the worker has no replay endpoint"))
            return
        if effect.from_seq > 0:
            await self._check_identity_before_replay()
        if self._worker != effect.worker:
            self._around.feed(ReplayUnavailable(effect.worker, effect.rank, "another process took its place"))
            return
        answer = await replay(self._around.sockets, endpoint, from_seq=effect.from_seq, timeout_s=REPLAY_TIMEOUT_S)
        if isinstance(answer, NoReplay):
            self._around.feed(ReplayUnavailable(effect.worker, effect.rank, answer.reason))
            return
        batches: list[KvBatch] = []
        for position, (seq, payload) in enumerate(answer.messages):
            batch = self._decoded(payload)
            if batch is not None:
                batches.append(KvBatch(effect.worker, effect.rank, seq, batch.events))
            if position % REPLAY_MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
        self._around.feed(ReplayArrived(effect.worker, effect.rank, tuple(batches)))


def _as_configured(description: Description, config: WorkerConfig) -> Description:
    """What the operator stated about a worker goes over what it says of itself."""
    sources = _sources(description.sources, config)
    spec = msgspec.structs.replace(
        description.spec,
        models=(config.model,) if config.model else description.spec.models,
        role=config.role,
        sends_events=bool(sources),
    )
    return msgspec.structs.replace(description, spec=spec, sources=sources)


def _sources(found: tuple[EventSource, ...], config: WorkerConfig) -> tuple[EventSource, ...]:
    if config.events == "none":
        return ()
    if config.events != "auto":
        bind = config.events.startswith("bind:")
        found = (EventSource(rank=0, endpoint=config.events.removeprefix("bind:"), bind=bind),)
    if config.replay != "auto":
        replay_endpoint = None if config.replay == "none" else config.replay
        found = tuple(msgspec.structs.replace(source, replay=replay_endpoint) for source in found)
    if config.topic:
        found = tuple(msgspec.structs.replace(source, topic=config.topic) for source in found)
    return found


def _kinds(events: tuple[KvEvent, ...]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for event in events:
        match event:
            case BlocksStored():
                kind, count = "stored", 1
            case BlocksRemoved():
                kind, count = "removed", len(event.hashes)
            case BlocksCleared():
                kind, count = "cleared", 1
            case EventsSkipped():
                kind, count = f"skipped_{event.kind}", event.count
        counts[kind] = counts.get(kind, 0) + count
    return counts
