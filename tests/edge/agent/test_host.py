"""The agent's sockets: what strangers may send, and an agent that comes back at its address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvrelay.core.model.units import IndexState
from kvrelay.edge.agent import wire
from kvrelay.edge.agent.host import AgentHost
from kvrelay.edge.system.config import WorkerConfig
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.fleet.lossy import BLOCKS, complete, watching

NOBODY = WorkerConfig(url="http://127.0.0.1:1")


@asynccontextmanager
async def asking(agent: AgentHost) -> AsyncIterator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(agent.snapshot_endpoint)
        yield socket


@pytest.mark.covers("S16")
@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"", wire.encode(wire.SnapshotRequest(wire.VERSION, 0))], "no rank 0 of the worker is known; known: none"),
        (
            [wire.encode(wire.SnapshotRequest(wire.VERSION, 0))],
            "a request has 2 frames, the first of them empty; came 1",
        ),
        ([b"x", b"y"], "a request has 2 frames, the first of them empty; came 2"),
        ([b"", b"\x80\x04\x95cposix\nsystem\n."], "not a message of an agent: "),
        ([b"", wire.encode(wire.Refusal(wire.VERSION, "no"))], "not a request"),
        (
            [b"", msgspec.msgpack.encode({"type": "snapshot", "version": 7, "rank": 0})],
            "speaks version 7 of the agent protocol; known here: 1",
        ),
    ],
)
async def test_what_is_no_request_is_refused_with_a_reason_and_the_next_one_is_answered(
    frames: list[bytes], reason: str
) -> None:
    async with AgentHost(NOBODY) as agent, asking(agent) as socket:
        await socket.send_multipart(frames)
        await socket.send_multipart([b"", wire.encode(wire.SnapshotRequest(wire.VERSION, 5))])
        first, second = [wire.decode((await socket.recv_multipart())[1]) for _ in range(2)]
        assert isinstance(first, wire.Refusal) and first.reason.startswith(reason)
        assert second == wire.Refusal(wire.VERSION, "no rank 5 of the worker is known; known: none")


async def test_a_heartbeat_comes_at_once_to_whoever_subscribes() -> None:
    async with AgentHost(NOBODY, interval_s=60.0) as agent:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, wire.TOPIC)
            socket.connect(agent.endpoint)
            assert await socket.poll(20_000)
            topic, beat = await socket.recv_multipart()
            assert topic == wire.TOPIC and wire.decode(beat) == agent.heartbeat()
            assert (agent.heartbeat().ranks, agent.heartbeat().worker_up) == ([], False)


async def test_everything_is_on_loopback_unless_told_otherwise() -> None:
    async with AgentHost(NOBODY) as agent:
        assert agent.endpoint.startswith("tcp://127.0.0.1:") and agent.snapshot_endpoint.startswith("tcp://127.0.0.1:")


async def test_an_address_that_is_taken_leaves_nothing_open() -> None:
    async with AgentHost(NOBODY) as agent:
        second = AgentHost(NOBODY, listen=agent.endpoint)
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            await second.start()


async def test_a_router_finds_an_agent_again_that_was_restarted(tmp_path: Path) -> None:
    listen = f"ipc://{tmp_path}/agent"
    async with MockFleet([MockSpec(name="a")]) as mocks:
        worker = WorkerConfig(url=mocks.workers[0].url, name="a", replay="none", agent=listen)
        plain = WorkerConfig(url=mocks.workers[0].url)
        async with AgentHost(plain, listen=listen, interval_s=0.1) as first, watching(worker) as watch:
            await watch.until_live()
            await complete(plain.url, 1)
            await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
            await first.stop()
            async with AgentHost(plain, listen=listen, interval_s=0.1) as second:
                assert second.snapshot_endpoint != first.snapshot_endpoint
                await watch.until(lambda: any(rank.blocks for rank in second.heartbeat().ranks))
                watch.gateway.fleet.resync("a")
                await watch.until(lambda: watch.target().index_blocks["gpu"] == BLOCKS)
                assert watch.target().index_state is IndexState.LIVE
