"""A router's ear to the agent beside one worker: heartbeats into the router, snapshots when it asks.

What an agent says counts only for the life of the worker that it speaks of. Workers that cannot tell their lives apart
leave that open, and a wrong snapshot then costs hits until the next heartbeat differs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio
from msgspec import Struct

from kvrelay.core.model.census import Census
from kvrelay.core.model.effects import RequestSnapshot
from kvrelay.core.model.events import AgentHeartbeat, KvBatch, SnapshotArrived, SnapshotUnavailable
from kvrelay.core.model.ids import WorkerId
from kvrelay.edge.agent import wire
from kvrelay.edge.connectors.vllm.describe import reachable
from kvrelay.edge.fleet.surroundings import Surroundings

FIRST_BEAT_WAIT_S = 2.0  # a heartbeat comes at once after subscribing; who is silent for so long is not there
SNAPSHOT_TIMEOUT_S = 25.0
BEATS_MISSED = 5

_log = logging.getLogger(__name__)


class AgentView(Struct, frozen=True):
    """What is known of an agent at this moment."""

    endpoint: str
    heard_s_ago: float | None
    last_seq: dict[int, int]  # per rank
    blocks: dict[int, int]
    problem: str | None


class AgentLink:
    """Lives from its making to `close()`. `worker` names the life that is known now; `run` is for a task of the owner.

    Raises ZMQError for an endpoint that cannot be connected to.
    """

    def __init__(
        self, name: str, endpoint: str, around: Surroundings, *, worker: Callable[[], tuple[WorkerId | None, bool]]
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._around = around
        self._worker = worker
        self._beat: wire.Heartbeat | None = None
        self._heard_at: float | None = None
        self._listening_since = around.clock()
        self._first_beat = asyncio.Event()
        self._complaint: str | None = None  # about the last message
        self._problem_said = False
        self._socket = zmq.asyncio.Socket(around.sockets, zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 100)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2**20)
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, wire.TOPIC)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close(linger=0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._heard(frames)
            except wire.AgentMessageError as error:
                self._complaint = str(error)

    async def snapshot(self, effect: RequestSnapshot) -> None:
        """Feeds SnapshotArrived or SnapshotUnavailable."""
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                answer = await self._ask(effect)
        except TimeoutError:
            answer = self._none(effect, f"no answer within {SNAPSHOT_TIMEOUT_S:g} s")
        except (wire.AgentMessageError, zmq.ZMQError) as error:
            answer = self._none(effect, str(error))
        self._around.feed(answer)

    def view(self) -> AgentView:
        beat = self._beat
        return AgentView(
            endpoint=self._endpoint,
            heard_s_ago=None if self._heard_at is None else round(self._around.clock() - self._heard_at, 1),
            last_seq={} if beat is None else {rank.rank: rank.last_seq for rank in beat.ranks},
            blocks={} if beat is None else {rank.rank: rank.blocks for rank in beat.ranks},
            problem=self._problem(),
        )

    def tell_problem(self) -> None:
        """Logs it when something begins to be wrong, and when it is right again."""
        problem = self._problem()
        if (problem is not None) == self._problem_said:
            return
        self._problem_said = problem is not None
        if problem is not None:
            _log.warning("agent_unusable worker=%s agent=%s: %s", self._name, self._endpoint, problem)
        else:
            _log.info("agent_usable worker=%s agent=%s", self._name, self._endpoint)

    # --- heartbeats ----------------------------------------------------------------------------------------------

    def _heard(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise wire.AgentMessageError(f"a heartbeat has 2 frames; came {len(frames)}")
        beat = wire.decode(frames[1])
        if not isinstance(beat, wire.Heartbeat):
            raise wire.AgentMessageError("not a heartbeat")
        self._beat, self._heard_at = beat, self._around.clock()
        self._first_beat.set()
        worker, _ = self._worker()
        if worker is None or not self._speaks_of_this_life(beat.incarnation):
            return
        self._complaint = None
        for rank in beat.ranks if beat.worker_up else ():
            census = Census(rank.blocks, rank.digest)
            self._around.feed(AgentHeartbeat(worker, rank.rank, rank.last_seq, census, rank.whole))

    def _speaks_of_this_life(self, incarnation: str | None) -> bool:
        worker, tells_lives = self._worker()
        return worker is not None and (incarnation == worker.incarnation or (incarnation is None and not tells_lives))

    def _problem(self) -> str | None:
        if self._complaint is not None:
            return self._complaint
        interval_s = self._beat.interval_s if self._beat is not None else 1.0
        silent_s = self._around.clock() - (self._heard_at or self._listening_since)
        if silent_s > BEATS_MISSED * interval_s:
            return f"no heartbeat for {silent_s:.0f} s; does `kvrelay agent` run at {self._endpoint}?"
        worker, _ = self._worker()
        if self._beat is None or worker is None:
            return None
        if not self._beat.ranks:
            late = self._around.clock() - self._listening_since > BEATS_MISSED * interval_s
            return f"it has not reached its worker {self._beat.worker_url} yet" if late else None
        if not self._speaks_of_this_life(self._beat.incarnation):
            return f"it watches another process ({self._beat.incarnation}) than the worker ({worker.incarnation})"
        return None

    # --- snapshots -----------------------------------------------------------------------------------------------

    async def _ask(self, effect: RequestSnapshot) -> SnapshotArrived | SnapshotUnavailable:
        try:
            async with asyncio.timeout(FIRST_BEAT_WAIT_S):
                await self._first_beat.wait()
        except TimeoutError:
            return self._none(effect, f"no heartbeat from {self._endpoint} yet")
        assert self._beat is not None
        endpoint = reachable(self._beat.snapshot_endpoint, _host_of(self._endpoint))
        head, pieces = await _fetch(self._around.sockets, endpoint, effect.rank)
        if not self._speaks_of_this_life(head.incarnation) or self._worker()[0] != effect.worker:
            return self._none(effect, f"it is of another life of the worker ({head.incarnation})")
        batches = []
        for piece in pieces:
            events = wire.decode_piece(piece)
            batches.append(KvBatch(effect.worker, effect.rank, head.last_seq, events))
            await asyncio.sleep(0)
        return SnapshotArrived(effect.worker, effect.rank, head.last_seq, tuple(batches), head.whole)

    def _none(self, effect: RequestSnapshot, reason: str) -> SnapshotUnavailable:
        _log.info("no snapshot from the agent of worker %s: %s", self._name, reason)
        return SnapshotUnavailable(effect.worker, effect.rank, reason)


async def _fetch(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, rank: int
) -> tuple[wire.SnapshotHead, list[bytes]]:
    """Raises AgentMessageError or ZMQError."""
    socket = zmq.asyncio.Socket(context, zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        socket.connect(endpoint)
        await socket.send_multipart([b"", wire.encode(wire.SnapshotRequest(wire.VERSION, rank))])
        frames = await socket.recv_multipart()
    finally:
        socket.close(linger=0)
    if len(frames) < 2:
        raise wire.AgentMessageError(f"a snapshot has at least 2 frames; came {len(frames)}")
    head = wire.decode(frames[1])
    match head:
        case wire.SnapshotHead():
            return head, frames[2:]
        case wire.Refusal():
            raise wire.AgentMessageError(head.reason)
        case _:
            raise wire.AgentMessageError("not a snapshot")


def _host_of(endpoint: str) -> str:
    host = endpoint.partition("://")[2].rpartition(":")[0]
    return host.strip("[]")
