"""The event proxy on real sockets, before a publisher that is written from the wire format alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvrelay.edge.chaos.events import EventProxy

END = b"\xff" * 8


class Publisher:
    """PUB and the replay ROUTER of one worker, driven by hand."""

    def __init__(self, context: zmq.Context) -> None:
        self.pub = context.socket(zmq.PUB)
        self.router = context.socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.setsockopt(zmq.LINGER, 0)
        self.events = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def send(self, *seqs: int) -> None:
        for seq in seqs:
            self.pub.send_multipart([b"kv@a", seq.to_bytes(8, "big"), b"x"])

    def answer_replay(self, batches: int, *, whole: bool = True) -> None:
        client, _, start = self.router.recv_multipart()
        for seq in range(int.from_bytes(start, "big"), batches):
            self.router.send_multipart([client, b"", b"kv@a", seq.to_bytes(8, "big"), b"x"])
        if whole:
            self.router.send_multipart([client, b"", b"", END, b""])


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publisher(context: zmq.Context) -> Publisher:
    return Publisher(context)


@contextmanager
def proxied(publisher: Publisher, context: zmq.Context, script: str = "") -> Iterator[tuple[EventProxy, zmq.Socket]]:
    """The proxy and a subscriber behind it that is known to hear."""
    with EventProxy(publisher.events, replay=publisher.replay) as proxy:
        assert proxy.wait_until_connected(10)
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        subscriber.connect(proxy.events)
        deadline = time.monotonic() + 10
        while not subscriber.poll(20):
            publisher.send(1000)
            assert time.monotonic() < deadline
        while subscriber.poll(200):
            subscriber.recv_multipart()
        proxy.do(script)
        yield proxy, subscriber
        subscriber.close(linger=0)


def heard(subscriber: zmq.Socket, count: int) -> list[int]:
    out = []
    for _ in range(count):
        assert subscriber.poll(10_000), f"only {out}"
        out.append(int.from_bytes(subscriber.recv_multipart()[1], "big"))
    assert not subscriber.poll(50), f"more than {out}"
    return out


def ask_replay(context: zmq.Context, proxy: EventProxy, from_seq: int) -> zmq.Socket:
    assert proxy.replay is not None
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(proxy.replay)
    socket.send_multipart([b"", from_seq.to_bytes(8, "big")])
    return socket


def replayed(socket: zmq.Socket, timeout_ms: int = 10_000) -> list[int | str]:
    """Sequence numbers, then "end"; or what came before the answer broke off."""
    out: list[int | str] = []
    while socket.poll(timeout_ms):
        frames = socket.recv_multipart()
        if frames[2] == END:
            return [*out, "end"]
        out.append(int.from_bytes(frames[2], "big"))
    return out


def test_batches_pass_untouched_and_in_order(publisher: Publisher, context: zmq.Context) -> None:
    with proxied(publisher, context) as (_, subscriber):
        publisher.send(*range(5))
        assert heard(subscriber, 5) == [0, 1, 2, 3, 4]


def test_faults_by_number_and_commands_while_it_runs(publisher: Publisher, context: zmq.Context) -> None:
    with proxied(publisher, context, "drop 1; duplicate 2; reorder 3 4; hold 5 until release") as (proxy, subscriber):
        publisher.send(*range(7))
        assert heard(subscriber, 6) == [0, 2, 2, 4, 3, 6]
        proxy.do("release")
        assert heard(subscriber, 1) == [5]
        proxy.do("delay 7 100ms; drop tail")
        publisher.send(7, 8, 9)
        assert heard(subscriber, 2) == [8, 9], "7 came last and is the tail"
        assert proxy.seqs("drop") == [1] and proxy.withheld() == 1


def test_the_number_that_comes_next_is_that_after_the_last_batch(publisher: Publisher, context: zmq.Context) -> None:
    with proxied(publisher, context, "drop 8") as (proxy, subscriber):
        publisher.send(7, 8, 9)
        assert heard(subscriber, 2) == [7, 9]
        assert proxy.next_seq == 10


def test_replay_passes_through_and_can_be_made_worse(publisher: Publisher, context: zmq.Context) -> None:
    with EventProxy(publisher.events, replay=publisher.replay) as proxy:
        for script, answer in (
            ("", [1, 2, 3, 4, "end"]),
            ("replay drop 2", [1, 3, 4, "end"]),
            ("replay last 2", [3, 4, "end"]),
            ("replay cut 2", [1, 2]),
            ("replay delay 50ms", [1, 2, 3, 4, "end"]),
        ):
            proxy.do(f"replay on\n{script}")
            before = proxy.next_seq
            with ask_replay(context, proxy, 1) as asking:
                publisher.answer_replay(5)
                assert replayed(asking, 500 if "cut" in script else 10_000) == answer, script
            assert proxy.next_seq == before, "who asks for old batches does not move what comes next"
        proxy.do("replay off")
        with ask_replay(context, proxy, 1) as asking:
            assert replayed(asking, 300) == []
        assert proxy.actions[-1].action == "replay_unanswered"


def test_what_the_worker_itself_cut_is_passed_on_so_that_the_rest_can_be_asked_for(
    publisher: Publisher, context: zmq.Context
) -> None:
    """A worker's socket drops what lies beyond its mark, and the end marker; kept back, it would be no answer."""
    with EventProxy(publisher.events, replay=publisher.replay) as proxy:
        with ask_replay(context, proxy, 0) as asking:
            publisher.answer_replay(3, whole=False)
            assert replayed(asking, 2_000) == [0, 1, 2]
        with ask_replay(context, proxy, 3) as asking:
            publisher.answer_replay(5)
            assert replayed(asking) == [3, 4, "end"]
        proxy.do("replay cut 1")
        with ask_replay(context, proxy, 0) as asking:
            publisher.answer_replay(3, whole=False)
            assert replayed(asking, 2_000) == [0]
        assert [done.detail for done in proxy.actions] == ["3 of 3 batches", "2 of 2 batches", "1 of 3 batches"]


def test_without_replay_there_is_no_endpoint(publisher: Publisher) -> None:
    with EventProxy(publisher.events) as proxy:
        assert proxy.replay is None


def test_it_can_stand_before_a_publisher_and_a_subscriber_that_both_want_the_other_side(context: zmq.Context) -> None:
    subscriber, publisher = context.socket(zmq.SUB), context.socket(zmq.PUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    bound = f"tcp://127.0.0.1:{subscriber.bind_to_random_port('tcp://127.0.0.1')}"
    with EventProxy("bind:auto", listen=f"connect:{bound}") as proxy:
        publisher.connect(proxy.upstream)
        assert proxy.wait_until_connected(10)
        deadline = time.monotonic() + 10
        while not subscriber.poll(20):
            publisher.send_multipart([b"kv@a", bytes(8), b"x"])
            assert time.monotonic() < deadline
        assert subscriber.recv_multipart() == [b"kv@a", bytes(8), b"x"]
    for socket in (subscriber, publisher):
        socket.close(linger=0)


def test_what_is_no_batch_passes_for_the_subscriber_to_judge(publisher: Publisher, context: zmq.Context) -> None:
    with proxied(publisher, context, "drop all") as (_, subscriber):
        publisher.pub.send_multipart([b"kv@a", b"short", b"x"])
        assert subscriber.poll(10_000) and subscriber.recv_multipart()[1] == b"short"
