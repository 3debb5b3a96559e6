"""Event sockets that several workers connect to: whose message is whose, and what is said of messages of nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq

from kvrelay.core.model.units import IndexState, RouteReason
from kvrelay.edge.connectors.base import EventSource
from kvrelay.edge.fleet.event_sockets import MAX_UNKNOWN_TOPICS, EventSockets, Subscription
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.system.config import WorkerConfig
from kvrelay.edge.system.ports import spare_port
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.fleet.lossy import BLOCKS, SIZE, complete, watching


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{spare_port()}"


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


class Shared:
    """One bound socket with some members, and a publisher that is connected to it."""

    def __init__(self, sockets: EventSockets, context: zmq.Context, endpoint: str) -> None:
        self.sockets, self.endpoint = sockets, endpoint
        self.got: list[tuple[str, str, int]] = []
        self.malformed: list[tuple[str, str]] = []
        self.connections: list[str] = []
        self.publisher = context.socket(zmq.PUB)
        self.publisher.setsockopt(zmq.LINGER, 0)

    def join(self, worker: str, topic: str) -> Subscription:
        return self.sockets.subscribe(
            worker,
            EventSource(0, self.endpoint, topic=topic, bind=True),
            on_message=lambda topic, seq, payload: self.got.append((worker, topic.decode(), seq)),
            on_malformed=lambda topic, reason: self.malformed.append((worker, reason)),
            on_connected=lambda: self.connections.append(worker),
        )

    def send(self, topic: str, seq: int = 0) -> None:
        self.publisher.send_multipart([topic.encode(), seq.to_bytes(8, "big"), b"x"])

    async def sent(self, *topics: str) -> list[tuple[str, str]]:
        """Who gets messages of these topics; the last one's arrival shows that all have arrived."""
        for topic in topics:
            self.send(topic)
        await self.mark()
        return [(worker, topic) for worker, topic, seq in self.got if seq == 0]

    async def mark(self) -> None:
        before = self.view().unknown_topics.get("mark", 0)
        self.send("mark")
        await until(lambda: self.view().unknown_topics.get("mark", 0) > before)

    def view(self):
        return self.sockets.views()[0]


@asynccontextmanager
async def shared(*members: tuple[str, str]) -> AsyncIterator[tuple[Shared, list[Subscription], Metrics]]:
    context, metrics = zmq.Context(), Metrics()
    one = Shared(EventSockets(context, metrics), context, free_endpoint())
    joined = [one.join(*member) for member in members]
    one.publisher.connect(one.endpoint)
    try:
        await until(lambda: one.connections)
        while "mark" not in one.view().unknown_topics:  # the subscription has to reach the publisher first
            one.send("mark")
            await asyncio.sleep(0.01)
        await one.mark()
        yield one, joined, metrics
    finally:
        for member in joined:
            member.close()
        context.destroy(linger=0)


async def test_a_message_belongs_to_the_worker_whose_topic_it_has() -> None:
    async with shared(("a", "kv@a"), ("ab", "kv@ab@m"), ("w-1", "kv@w-1")) as (one, _, _):
        got = await one.sent("kv@a", "kv@a@m", "kv@ab@m", "kv@w-1@m", "kv@w-10@m", "kv@abc", "other")
        assert got == [("a", "kv@a"), ("a", "kv@a@m"), ("ab", "kv@ab@m"), ("w-1", "kv@w-1@m")]


async def test_topics_of_nobody_are_counted_and_shown_and_bounded() -> None:
    async with shared(("a", "kv@a")) as (one, _, metrics):
        before = one.view().unknown_messages
        await one.sent("kv@A", "kv@A", *(f"t{i}" for i in range(2 * MAX_UNKNOWN_TOPICS)))
        view = one.view()
        assert view.unknown_topics["kv@A"] == 2 and len(view.unknown_topics) == MAX_UNKNOWN_TOPICS
        assert view.unknown_messages - before == 2 + 2 * MAX_UNKNOWN_TOPICS + 1
        page = metrics.render().decode()
        assert f'kvrelay_events_unknown_topic_total{{endpoint="{one.endpoint}"}} {view.unknown_messages:.1f}' in page


async def test_who_cannot_be_told_apart_gets_nothing_and_says_why() -> None:
    async with shared(("a", "kv@a"), ("b", ""), ("c", "kv@a")) as (one, (a, b, c), _):
        assert a.problem is None
        assert b.problem == f"it shares {one.endpoint} with a and has no `topic` to be told apart by"
        assert c.problem == f"its topic kv@a on {one.endpoint} is that of a"
        assert await one.sent("kv@a", "kv@b") == [("a", "kv@a")]
        a.close()
        assert c.problem is None and await one.sent("kv@a") == [("a", "kv@a"), ("c", "kv@a")]


async def test_a_worker_alone_on_its_socket_needs_no_topic() -> None:
    async with shared(("a", "kv@a"), ("b", "")) as (one, (a, b), _):
        a.close()
        assert b.problem is None
        one.send("anything", 7)
        await until(lambda: ("b", "anything", 7) in one.got)


@pytest.mark.covers("S16")
async def test_malformed_messages_are_those_of_the_worker_whose_topic_they_have() -> None:
    async with shared(("a", "kv@a"), ("b", "kv@b")) as (one, _, _):
        one.publisher.send_multipart([b"kv@b@m", b"short", b"x"])
        one.publisher.send_multipart([b"kv@c", b"short", b"x"])
        assert await one.sent("kv@a") == [("a", "kv@a")]
        assert one.malformed == [("b", "sequence number of 5 bytes")] and one.view().unknown_topics["kv@c"] == 1


async def test_the_address_is_free_again_when_the_last_worker_leaves() -> None:
    async with shared(("a", "kv@a"), ("b", "kv@b")) as (one, (a, b), _):
        a.close()
        a.close()
        assert one.view().workers == {"b": "kv@b"}
        b.close()
        assert one.sockets.views() == []


# --- with mock worker processes -----------------------------------------------------------------------------------


@asynccontextmanager
async def connecting(endpoint: str, *names: str) -> AsyncIterator[MockFleet]:
    specs = [MockSpec(name=name, events=endpoint, events_mode="connect") for name in names]
    async with MockFleet(specs) as mocks:
        yield mocks


@pytest.mark.parametrize("events", ["auto", "explicit", "bind"])
async def test_two_workers_on_one_socket_of_the_gateway(events: str) -> None:
    endpoint = free_endpoint()
    given = {"auto": "auto", "explicit": endpoint, "bind": f"bind:{endpoint}"}[events]
    async with connecting(endpoint, "a", "b") as mocks:
        workers = [WorkerConfig(url=w.url, name=w.name, events=given) for w in mocks.workers]
        async with watching(*workers) as watch:
            await watch.until(lambda: len(watch.gateway.status().workers) == 2)
            await complete(mocks.worker("a").url, 1, 2)
            await complete(mocks.worker("b").url, 3)
            await watch.until(lambda: watch.target("a").index_blocks["gpu"] == 2 * BLOCKS)
            await watch.until(lambda: watch.target("b").index_blocks["gpu"] == BLOCKS)
            assert [await watch.matched(n, "b") for n in (1, 2, 3)] == [0, 0, BLOCKS * SIZE]
            (view,) = watch.gateway.fleet.shared_event_sockets()
            assert view.workers == {"a": "kv@a@mock-model", "b": "kv@b@mock-model"} and view.unknown_messages == 0
            assert {watch.target(n).index_state for n in "ab"} == {IndexState.LIVE}


@pytest.mark.covers("S23", "RT-22")
async def test_a_wrong_topic_on_a_shared_socket_makes_that_index_unusable_and_no_other() -> None:
    endpoint = free_endpoint()
    async with connecting(endpoint, "a", "b") as mocks:
        a, b = mocks.workers
        right = WorkerConfig(url=a.url, name="a")
        wrong = WorkerConfig(url=b.url, name="b", topic="kv@nobody")
        async with watching(right, wrong) as watch:
            await watch.until(lambda: len(watch.gateway.status().workers) == 2)
            await complete(a.url, 1)
            n = 2
            while not watch.gateway.fleet.shared_event_sockets()[
                0
            ].unknown_topics:  # until it has connected, all is lost
                await complete(b.url, n)
                n += 1
            await watch.until(lambda: watch.target("a").index_blocks["gpu"] == BLOCKS)
            await watch.until(lambda: watch.target("b").index_state is IndexState.UNUSABLE)
            because = "its events have topic `kv@b@mock-model`, subscribed is `kv@nobody`"
            assert watch.target("b").index_problem == because
            assert watch.gateway.fleet.view("b").events_problem == because
            (view,) = watch.gateway.fleet.shared_event_sockets()
            assert view.unknown_topics.keys() == {"kv@b@mock-model"}
            assert watch.target("a").index_state is IndexState.LIVE


@pytest.mark.covers("S23", "MK-03")
async def test_with_no_usable_index_the_receipt_says_that_load_decided() -> None:
    async with MockFleet([MockSpec(name="a"), MockSpec(name="b")]) as mocks:
        for worker in mocks.workers:
            await complete(worker.url, 1)
        workers = [WorkerConfig(url=w.url, name=w.name, topic="kv@nobody") for w in mocks.workers]
        async with watching(*workers) as watch:
            await watch.until(lambda: len(watch.gateway.status().workers) == 2)
            await watch.until(lambda: {watch.target(n).index_state for n in "ab"} == {IndexState.UNUSABLE})
            await complete(watch.gateway.url, 1)
            await watch.until(lambda: watch.gateway.receipts.recent(1))
            receipt = watch.gateway.receipts.recent(1)[0]
            assert receipt.route_reason is RouteReason.CACHE_INDEX_UNUSABLE
            assert receipt.index_state is IndexState.UNUSABLE


async def test_an_endpoint_that_cannot_be_subscribed_to_is_a_problem_at_once() -> None:
    async with MockFleet([MockSpec(name="a")]) as mocks:
        worker = WorkerConfig(url=mocks.workers[0].url, name="a", events="bind:tcp://203.0.113.1:5557")
        async with watching(worker) as watch:
            await watch.until(lambda: watch.target().index_state is IndexState.UNUSABLE)
            assert watch.target().index_problem is not None
            assert watch.target().index_problem.startswith("cannot subscribe to tcp://203.0.113.1:5557: ")


async def test_nothing_is_listened_on_beyond_loopback_because_a_worker_says_so() -> None:
    async with (
        connecting("tcp://203.0.113.1:5557", "a") as mocks,
        watching(WorkerConfig(url=mocks.workers[0].url, name="a")) as watch,
    ):
        await watch.until(lambda: watch.target().index_state is IndexState.APPROXIMATE)
        assert watch.gateway.fleet.view("a").events_problem == (
            "it publishes to tcp://203.0.113.1:5557, beyond loopback;"
            ' `events = "bind:tcp://203.0.113.1:5557"` says that we shall listen there'
        )
        assert watch.gateway.fleet.shared_event_sockets() == []
