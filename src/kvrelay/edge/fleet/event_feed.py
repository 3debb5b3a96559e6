"""The KV events of one worker on their way to the router, each under the incarnation that sent it.

The difficulty is restarts. Nothing in an event message names the process that sent it, and sequence numbers begin at 0
again. So a batch is attributed to the incarnation that is known when it comes, and while that is in doubt, messages are
held (`pause`) until the worker has been asked who it is (`attach`, then `resume`). A sequence number that did not grow
and a connection that was made anew are such doubts; others are noticed by whoever watches the worker.

Not every new stream is a new process: an engine behind a living API server may be started again, and the server still
names the old start time. The publisher's own clock tells that apart from a repeated batch: an old number with a newer
time is from another stream, whatever the worker says (`began_again`).

The other difficulty is loss without a trace: what is published while no connection stands leaves a gap only if
something follows. So after every connection the worker is asked for what came after the last message known.

A restart that shows no sign in time leaves a gap in the sequence. The router keeps what follows a gap aside and asks
for a replay, and before any replay of a gap the watch asks who the worker is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

import zmq

from kvrelay.core.model.effects import RequestReplay
from kvrelay.core.model.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventsSkipped,
    KvBatch,
    KvEvent,
    ReplayArrived,
    ReplayUnavailable,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.edge.connectors.base import Connector, DecodedBatch, EventSource, MalformedEvents
from kvrelay.edge.connectors.vllm.replay import NoReplay, Replayed, replay
from kvrelay.edge.fleet.event_sockets import Subscription
from kvrelay.edge.fleet.surroundings import Surroundings

MAX_HELD_MESSAGES = 10_000
REPLAY_TIMEOUT_S = 5.0
MESSAGES_PER_TURN = 32  # of a replay or of what was held, before other callbacks of the loop run
QUIET_AFTER_CHECK_S = 1.0
SUBSCRIPTION_SETTLES_S = 0.1  # after the handshake the publisher still has to learn what we subscribe to

_log = logging.getLogger(__name__)


class _Message(NamedTuple):
    seq: int
    payload: bytes


class EventFeed:
    """Sockets and sequence numbers of one worker.

    `on_doubt` is called when another process may have taken its place; `spawn` runs work that ends with the watch.
    """

    def __init__(
        self,
        name: str,
        around: Surroundings,
        *,
        on_doubt: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._name = name
        self._around = around
        self._on_doubt = on_doubt
        self._spawn = spawn
        self._worker: WorkerId | None = None
        self._connector: Connector | None = None
        self._tells_lives = False
        self._checked_at_s = float("-inf")
        self._paused = False
        self._attributable = asyncio.Event()  # unset while paused, and until what was held is published
        self._attributable.set()
        self._asking = asyncio.Lock()
        self._held: deque[_Message] = deque()
        self._subscribers: dict[EventSource, Subscription] = {}
        self._not_subscribed: dict[EventSource, str] = {}  # why
        self._foreign_topic: str | None = None
        self._connected: set[EventSource] = set()
        self.last_seq: dict[int, int] = {}
        self._last_published_s: dict[int, float] = {}
        self.began_again = False
        """Some rank's stream surely began again since the worker was attached under its present name."""
        self.malformed_messages = 0

    @property
    def sources(self) -> tuple[EventSource, ...]:
        return tuple(self._subscribers)

    @property
    def problem(self) -> str | None:
        """Why its events cannot reach us, where that is certain; None while nothing is known against it."""
        for reason in self._not_subscribed.values():
            return reason
        if self.last_seq:
            return None
        shared = next((part.problem for part in self._subscribers.values() if part.problem is not None), None)
        return shared or self._foreign_topic

    @property
    def held_messages(self) -> int:
        return len(self._held)

    def attach(
        self, worker: WorkerId, connector: Connector, sources: tuple[EventSource, ...], *, tells_lives: bool
    ) -> None:
        """From here on batches are this incarnation's. `tells_lives`: asking again would show a restart."""
        if worker != self._worker:
            self.last_seq.clear()
            self._last_published_s.clear()
            self._foreign_topic = None
            self.began_again = False
        self._worker, self._connector, self._tells_lives = worker, connector, tells_lives
        self._subscribe(sources)

    def pause(self) -> None:
        """Holds all messages until `resume`."""
        self._paused = True
        self._attributable.clear()

    def resume(self) -> None:
        """The worker has said who it is: what was held is attributed to the incarnation attached now."""
        self._paused = False
        self._checked_at_s = self._around.clock()
        self._release()

    def _release(self) -> None:
        """A part per turn of the loop; what arrives meanwhile queues up behind it."""
        for _ in range(MESSAGES_PER_TURN):
            if self._paused:
                return
            if not self._held:
                self._attributable.set()
                return
            message = self._held.popleft()
            batch = self._decoded(message.payload)
            if batch is None:
                continue
            if self._is_of_another_stream(message.seq, batch):
                self._held.appendleft(message)
                self._doubt()
                return
            self._publish(message.seq, batch)
        asyncio.get_running_loop().call_soon(self._release)

    def close(self) -> None:
        """Nothing is fed after this."""
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._subscribers.clear()
        self._held.clear()

    async def replay(self, effect: RequestReplay) -> None:
        """Asks for old messages and feeds ReplayArrived or ReplayUnavailable."""
        async with self._asking:
            await self._replay(effect)

    async def _replay(self, effect: RequestReplay) -> None:
        answer = await self._ask(effect.worker, effect.rank, effect.from_seq)
        if isinstance(answer, NoReplay):
            _log.info("no replay from worker %s: %s", self._name, answer.reason)
            self._around.feed(ReplayUnavailable(effect.worker, effect.rank, answer.reason))
            return
        batches: list[KvBatch] = []
        for position, (seq, payload) in enumerate(answer.messages, start=1):
            batch = self._decoded(payload)
            if batch is not None:
                self._saw(effect.rank, seq, batch.published_s)
                batches.append(KvBatch(effect.worker, effect.rank, seq, batch.events))
            if position % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
                if self._worker != effect.worker:
                    break  # replaced meanwhile: the router takes the answer for a late one
        self._around.feed(ReplayArrived(effect.worker, effect.rank, tuple(batches)))

    async def _ask(self, worker: WorkerId, rank: int, from_seq: int) -> Replayed | NoReplay:
        if self._worker != worker:
            return NoReplay("another process took its place")
        source = next((source for source in self._subscribers if source.rank == rank), None)
        if source is None or source.replay is None:
            return NoReplay("the worker has no replay endpoint")
        answer = await replay(
            self._around.sockets, source.replay, topic=source.topic, from_seq=from_seq, timeout_s=REPLAY_TIMEOUT_S
        )
        if self._worker != worker:
            return NoReplay("another process took its place")
        if isinstance(answer, NoReplay) and answer.foreign_topic:
            self._foreign_topic = answer.reason
        return answer

    def _on_connected(self, source: EventSource) -> None:
        if source in self._connected:
            self._doubt()
        self._connected.add(source)
        self._spawn(self._catch_up(source))

    async def look_again(self) -> None:
        """Asks for what may have been missed; it also shows a topic that is not the one subscribed to."""
        for source in self.sources:
            await self._catch_up(source)

    async def _catch_up(self, source: EventSource) -> None:
        """What is fed here twice, because it also came by itself, the router knows by its number."""
        await asyncio.sleep(SUBSCRIPTION_SETTLES_S)
        await self._attributable.wait()
        if source.replay is None or self._worker is None:
            return
        async with self._asking:  # a replay under way brings most of it, and then little is left to ask for
            answer = await self._ask(self._worker, source.rank, self.last_seq.get(source.rank, -1) + 1)
        for seq, payload in answer.messages if isinstance(answer, Replayed) else ():
            if seq > self.last_seq.get(source.rank, -1):
                self._on_message(seq, payload)
                await asyncio.sleep(0)

    def _subscribe(self, sources: tuple[EventSource, ...]) -> None:
        """Sockets whose source stays are kept: they reconnect by themselves, and a new one would miss messages."""
        for source in [source for source in self._not_subscribed if source not in sources]:
            del self._not_subscribed[source]
        for source in self.sources:
            if source not in sources:
                self._subscribers.pop(source).close()
                self._connected.discard(source)
        for source in sources:
            if source not in self._subscribers:
                try:
                    self._subscribers[source] = self._subscriber(source)
                    self._not_subscribed.pop(source, None)
                except zmq.ZMQError as error:
                    self._not_subscribed[source] = f"cannot subscribe to {source.endpoint}: {error}"
                    _log.error("no events of worker %s from %s: %s", self._name, source.endpoint, error)

    def _subscriber(self, source: EventSource) -> Subscription:
        return self._around.event_sockets.subscribe(
            self._name,
            source,
            on_message=lambda topic, seq, payload: self._on_message(seq, payload),
            on_malformed=lambda topic, reason: self._on_malformed(reason),
            on_connected=lambda: self._on_connected(source),
        )

    def _on_message(self, seq: int, payload: bytes) -> None:
        if not self._attributable.is_set():
            self._hold(_Message(seq, payload))
            return
        batch = self._decoded(payload)
        if batch is None:
            return
        if self._is_of_another_stream(seq, batch) or self._shows_restart(seq, batch.rank):
            self._hold(_Message(seq, payload))
            self._doubt()
            return
        self._publish(seq, batch)

    def _doubt(self) -> None:
        self.pause()
        self._on_doubt()

    def _is_of_another_stream(self, seq: int, batch: DecodedBatch) -> bool:
        """Surely: its number is not new, but its time is."""
        last_seq = self.last_seq.get(batch.rank)
        if last_seq is None or seq > last_seq or batch.published_s <= self._last_published_s[batch.rank]:
            return False
        self.began_again = True
        return True

    def _shows_restart(self, seq: int, rank: int) -> bool:
        """A sequence that begins again always does. A late or repeated batch might, and is asked about now and then,
        but only of workers that can tell one life from the next."""
        last_seq = self.last_seq.get(rank)
        if last_seq is None or seq > last_seq:
            return False
        if seq == 0:
            return True
        return self._tells_lives and self._around.clock() - self._checked_at_s > QUIET_AFTER_CHECK_S

    def _hold(self, message: _Message) -> None:
        if len(self._held) >= MAX_HELD_MESSAGES:
            self._held.popleft()  # the hole shows in the sequence and is replayed
        self._held.append(message)

    def _publish(self, seq: int, batch: DecodedBatch) -> None:
        assert self._worker is not None
        self._saw(batch.rank, seq, batch.published_s)
        self._around.observer.count_events(self._name, _kinds(batch.events))
        self._around.feed(KvBatch(self._worker, batch.rank, seq, batch.events))

    def _saw(self, rank: int, seq: int, published_s: float) -> None:
        self.last_seq[rank] = max(seq, self.last_seq.get(rank, seq))
        self._last_published_s[rank] = max(published_s, self._last_published_s.get(rank, published_s))

    def _decoded(self, payload: bytes) -> DecodedBatch | None:
        assert self._connector is not None
        try:
            return self._connector.decode_events(payload)
        except MalformedEvents as error:
            self._on_malformed(str(error))
            return None

    def _on_malformed(self, reason: str) -> None:
        self.malformed_messages += 1
        self._around.observer.count_malformed(self._name)
        if self.malformed_messages == 1 or self.malformed_messages % 1000 == 0:
            _log.warning("malformed events from %s: %s; count=%d", self._name, reason, self.malformed_messages)


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
