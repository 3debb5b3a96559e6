"""The event stream as a subscriber sees it: frames, payload, replay. Decoded here by hand, not by our own connector."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, BlocksStored
from kvrelay.edge.worker import wire
from kvrelay.edge.worker.launch import RunningWorker
from tests.edge.worker.conftest import Client

QUICK = {"prefill_tokens_per_s": 1e6, "decode_ms": 0.5}


def stored(**members: Any) -> BlocksStored:
    made: dict[str, Any] = {
        "hashes": (2**64 - 1, 5),
        "parent": None,
        "token_ids": np.arange(8, dtype=np.uint32),
        "block_size_tokens": 4,
    }
    return BlocksStored(**{**made, **members})


def decoded(*events: Any, adapters: tuple[str, ...] = ()) -> Any:
    return msgspec.msgpack.decode(wire.encode_batch(events, wall_s=1.5, adapters=adapters))


def test_a_batch_is_an_array_of_time_events_and_rank() -> None:
    payload = wire.encode_batch((BlocksCleared(),), wall_s=1.5, adapters=())
    assert payload[0] == 0x93
    assert msgspec.msgpack.decode(payload) == [1.5, [{"type": "AllBlocksCleared"}], 0]


@pytest.mark.covers("S10")
def test_events_are_maps_with_the_engines_keys() -> None:
    assert decoded(stored(), BlocksRemoved((7,)))[1] == [
        {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1, 5],
            "parent_block_hash": None,
            "token_ids": list(range(8)),
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
    ]


@pytest.mark.parametrize(
    ("members", "lora_id", "extra_keys"),
    [
        ({"adapter": "b"}, 2, [["b"], ["b"]]),
        ({"salt": "s"}, None, [["s"], None]),
        ({"adapter": "a", "salt": "s"}, 1, [["a", "s"], ["a"]]),
    ],
)
def test_adapter_on_every_block_and_salt_on_the_first(
    members: dict[str, Any], lora_id: int | None, extra_keys: Any
) -> None:
    (event,) = decoded(stored(**members), adapters=("a", "b"))[1]
    assert (event["lora_id"], event["lora_name"]) == (lora_id, members.get("adapter"))
    assert event["extra_keys"] == extra_keys


# --- a real worker -----------------------------------------------------------------------------------------------


class Sockets:
    """ZMQ sockets of one test, closed at its end."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._open: list[Any] = []

    def new(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        self._open.append(socket)
        return socket

    def close(self) -> None:
        for socket in self._open:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


def subscribe(sockets: Sockets, worker: RunningWorker) -> Any:
    """A SUB socket that surely gets everything from here on: the first try is repeated until something arrives."""
    assert worker.events is not None and worker.topic is not None
    socket = sockets.new(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, worker.topic.encode())
    socket.connect(worker.events)
    client = Client(worker.url)
    for i in range(100):
        client.complete(prompt=[150_000 + i] * 17, max_tokens=1)
        if socket.poll(50):
            while socket.poll(20):
                socket.recv_multipart()
            return socket
    raise AssertionError("the subscription did not come up")


def receive(socket: Any) -> tuple[bytes, int, Any]:
    topic, seq, payload = socket.recv_multipart()
    (number,) = struct.unpack(">Q", seq)
    return topic, number, msgspec.msgpack.decode(payload)


def replay(sockets: Sockets, worker: RunningWorker, start_seq: int) -> list[tuple[int, Any]]:
    """Ask as a DEALER does; the end marker must come last."""
    socket = sockets.new(zmq.DEALER)
    socket.connect(worker.replay)
    socket.send_multipart((b"", struct.pack(">Q", start_seq)))
    batches = []
    while True:
        empty, topic, seq, payload = socket.recv_multipart()
        assert empty == b""
        if seq == b"\xff" * 8:
            assert (topic, payload) == (b"", b"")
            return batches
        assert worker.topic is not None and topic == worker.topic.encode()
        batches.append((struct.unpack(">Q", seq)[0], msgspec.msgpack.decode(payload)))


def test_a_subscriber_gets_three_frames_with_rising_sequence_numbers(
    start: Callable[..., RunningWorker], sockets: Sockets
) -> None:
    worker = start(**QUICK, name="w1", model="m1")
    socket = subscribe(sockets, worker)
    before = Client(worker.url).state()["next_seq"]
    for i in range(2):
        Client(worker.url).complete(prompt=list(range(1000 * i, 1000 * i + 40)), max_tokens=1)
    for i in range(2):
        topic, seq, (_, events, rank) = receive(socket)
        assert (topic, seq, rank) == (b"kv@w1@m1", before + i, 0)
        expected = Keyer(b"0").prompt_keys(np.arange(1000 * i, 1000 * i + 40, dtype=np.uint32), 16).tolist()
        assert [event["block_hashes"] for event in events] == [expected]


def test_replay_has_everything_from_the_number_asked_and_an_end_marker(
    start: Callable[..., RunningWorker], sockets: Sockets
) -> None:
    worker = start(**QUICK)
    for i in range(5):
        Client(worker.url).complete(prompt=[i] * 20, max_tokens=1)
    assert [seq for seq, _ in replay(sockets, worker, 0)] == [0, 1, 2, 3, 4]
    assert [seq for seq, _ in replay(sockets, worker, 3)] == [3, 4]
    assert replay(sockets, worker, 99) == []


def test_the_replay_buffer_is_bounded(start: Callable[..., RunningWorker], sockets: Sockets) -> None:
    worker = start(**QUICK, replay_buffer_batches=2)
    for i in range(5):
        Client(worker.url).complete(prompt=[i] * 20, max_tokens=1)
    assert [seq for seq, _ in replay(sockets, worker, 0)] == [3, 4]


def test_a_replay_request_without_its_delimiter_gets_no_answer(
    start: Callable[..., RunningWorker], sockets: Sockets
) -> None:
    worker = start(**QUICK)
    socket = sockets.new(zmq.DEALER)
    socket.connect(worker.replay)
    socket.send(struct.pack(">Q", 0))
    assert not socket.poll(300)
    assert replay(sockets, worker, 0) == [], "and the next client is served"


def test_a_dropped_batch_is_a_gap_that_replay_fills(start: Callable[..., RunningWorker], sockets: Sockets) -> None:
    worker = start(**QUICK)
    socket = subscribe(sockets, worker)
    client = Client(worker.url)
    seq = client.state()["next_seq"]
    client.fault(kind="drop_event", seq=seq + 1)
    for i in range(3):
        client.complete(prompt=[60_000 + i] * 20, max_tokens=1)
    assert [receive(socket)[1] for _ in range(2)] == [seq, seq + 2]
    assert [number for number, _ in replay(sockets, worker, seq + 1)] == [seq + 1, seq + 2]
    assert client.state()["counters"]["event_batches_withheld"] == 1


def test_reset_is_published_with_the_next_step_before_its_stored_event(
    start: Callable[..., RunningWorker], sockets: Sockets
) -> None:
    worker = start(**QUICK)
    client = Client(worker.url)
    client.complete(prompt=[1] * 20, max_tokens=1)
    client.ask("POST", "/reset_prefix_cache")
    assert len(replay(sockets, worker, 0)) == 1
    client.complete(prompt=[1] * 20, max_tokens=1)
    (_, (_, events, _)) = replay(sockets, worker, 1)[0]
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


def test_a_worker_can_connect_to_a_bound_subscriber(start: Callable[..., RunningWorker], sockets: Sockets) -> None:
    socket = sockets.new(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    worker = start(**QUICK, events=f"tcp://127.0.0.1:{port}", events_mode="connect")
    for i in range(100):
        Client(worker.url).complete(prompt=[i] * 20, max_tokens=1)
        if socket.poll(50):
            assert receive(socket)[0] == b"kv@own@mock-model"
            return
    raise AssertionError("nothing arrived")


def test_without_events_there_is_no_source(start: Callable[..., RunningWorker]) -> None:
    worker = start(**QUICK, events="none")
    assert (worker.events, worker.replay, worker.topic) == (None, None, None)
    client = Client(worker.url)
    assert client.get("/kv_event_sources").json() == {}
    assert client.complete(prompt=[1] * 20, max_tokens=1).status == 200
