"""Runs an agent beside one worker: follows its events, publishes heartbeats, serves snapshots.

    async with AgentHost(WorkerConfig(url="http://127.0.0.1:8100")) as agent:
        agent.endpoint        # goes into `[[workers]] agent`

The engine is not changed and does not notice: the agent is one more subscriber.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from kvrelay.core.index.agent import Agent
from kvrelay.core.model.events import Event
from kvrelay.edge.agent import wire
from kvrelay.edge.fleet.static import Fleet
from kvrelay.edge.system.clock import monotonic_s
from kvrelay.edge.system.config import Config, WorkerConfig
from kvrelay.edge.system.sections import HealthSection

DEFAULT_INTERVAL_S = 1.0
DEFAULT_MAX_BLOCKS = 4_000_000
TAIL_CHECK_S = 3.0  # between two questions to the worker whether anything follows its last event
REPLIES_AT_ONCE = 4  # snapshots under way to one reader; what it asks for beyond that is not sent

_log = logging.getLogger(__name__)


class AgentHost:
    """Valid between `start()` and `stop()`. `auto` takes a free loopback port."""

    def __init__(
        self,
        worker: WorkerConfig,
        *,
        listen: str = "auto",
        snapshots: str = "auto",
        interval_s: float = DEFAULT_INTERVAL_S,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
    ) -> None:
        self._config = worker
        self._listen = listen
        self._snapshots_at = snapshots
        self._interval_s = interval_s
        self.agent = Agent(max_blocks=max_blocks)
        self._fleet = Fleet(
            Config(workers=(worker,), health=HealthSection(interval_s=interval_s)), feed=self._feed, clock=monotonic_s
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.endpoint = ""
        self.snapshot_endpoint = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Raises ZMQError for an endpoint that cannot be bound."""
        self._context = zmq.asyncio.Context()
        try:
            self._beats = self._context.socket(zmq.XPUB)
            self._beats.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._snapshots = self._context.socket(zmq.ROUTER)
            self._snapshots.setsockopt(zmq.SNDHWM, REPLIES_AT_ONCE)
            self._snapshots.setsockopt(zmq.MAXMSGSIZE, 4096)  # requests are small
            self.endpoint = _bind(self._beats, self._listen)
            self.snapshot_endpoint = _bind(self._snapshots, self._snapshots_at)
            await self._fleet.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work()) for work in (self._beat, self._greet, self._serve, self._check_tails)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.stop()
        self._context.destroy(linger=0)

    def _feed(self, event: Event) -> None:
        for ask in self.agent.step(event):
            self._fleet.replay(ask)

    async def _check_tails(self) -> None:
        while True:
            await asyncio.sleep(TAIL_CHECK_S)
            for ask in self.agent.check_tails():
                self._fleet.replay(ask)

    # --- heartbeats ----------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await self._publish()
            await asyncio.sleep(self._interval_s)

    async def _greet(self) -> None:
        """A router that just subscribed learns at once where snapshots are served."""
        while True:
            subscription = await self._beats.recv()
            if subscription[:1] == b"\x01":
                await self._publish()

    async def _publish(self) -> None:
        await self._beats.send_multipart((wire.TOPIC, wire.encode(self.heartbeat())))

    def heartbeat(self) -> wire.Heartbeat:
        return wire.Heartbeat(
            version=wire.VERSION,
            worker_url=self._config.url,
            incarnation=self._incarnation(),
            worker_up=self.agent.worker_up,
            snapshot_endpoint=self.snapshot_endpoint,
            interval_s=self._interval_s,
            ranks=[
                wire.RankBeat(state.rank, state.last_seq, state.census.blocks, state.census.digest, state.whole)
                for state in self.agent.ranks()
            ],
        )

    def _incarnation(self) -> str | None:
        worker = self.agent.worker
        return worker.incarnation if worker is not None and self._fleet.view(self._config.name).tells_lives else None

    # --- snapshots -----------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            client, *frames = await self._snapshots.recv_multipart()
            reply = self._reply(frames)
            try:
                await self._snapshots.send_multipart((client, b"", *reply))
            except zmq.ZMQError as error:
                _log.warning("snapshot not sent: %s", error)

    def _reply(self, frames: list[bytes]) -> list[bytes]:
        try:
            if len(frames) != 2 or frames[0]:
                raise wire.AgentMessageError(f"a request has 2 frames, the first of them empty; came {len(frames)}")
            request = wire.decode(frames[1])
            if not isinstance(request, wire.SnapshotRequest):
                raise wire.AgentMessageError("not a request")
            return self._snapshot(request.rank)
        except wire.AgentMessageError as error:
            return [wire.encode(wire.Refusal(wire.VERSION, str(error)))]

    def _snapshot(self, rank: int) -> list[bytes]:
        """Refused while the worker does not answer: what it held is no backup of a worker that may be gone."""
        states = {state.rank: state for state in self.agent.ranks()}
        if rank not in states:
            raise wire.AgentMessageError(f"no rank {rank} of the worker is known; known: {sorted(states) or 'none'}")
        if not self.agent.worker_up:
            raise wire.AgentMessageError("the worker does not answer")
        state = states[rank]
        head = wire.SnapshotHead(wire.VERSION, self._incarnation(), rank, state.last_seq, state.whole)
        return [wire.encode(head), *wire.encode_pieces(self.agent.snapshot(rank))]


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    """Binds and says the address with its real port."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    socket.bind("tcp://127.0.0.1:*" if endpoint == "auto" else endpoint)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
