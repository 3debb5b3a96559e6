"""Publishes KV event batches on ZMQ and answers replay requests, in vLLM's protocol.

PUB: three frames, topic, sequence number (8 bytes big-endian) and payload. ROUTER: a client sends `[empty,
start_seq]` and gets `[empty, topic, seq, payload]` for what the bounded buffer still has, then the end marker. The
replay socket lives on a thread of its own that sleeps in the kernel: zmq sockets signal edge-triggered, and the event
loop has better to do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from kvrelay.core.engine.engine import PublishBatch
from kvrelay.edge.system.ports import LISTEN_TRIES, spare_port
from kvrelay.edge.worker import wire
from kvrelay.edge.worker.spec import MockSpec

log = logging.getLogger(__name__)

SEND_HIGH_WATER_MARK = 100_000
LINGER_MS = 200
STOP_ADDRESS = "inproc://stop-replay"


class Publisher:
    """The event stream of one worker. `withholds(seq)` is asked before each send; a withheld batch stays replayable."""

    def __init__(self, spec: MockSpec, withholds: Callable[[int], bool]) -> None:
        self.topic = spec.topic
        self.sent_batches = 0
        self.withheld_batches = 0
        self.next_seq = 0
        self._topic_bytes = spec.topic.encode()
        self._adapters: Sequence[str] = spec.adapters
        self._withholds = withholds
        self._context = zmq.Context()
        self._buffer = ReplayBuffer(spec.replay_buffer_batches)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self.endpoint = self._attach(spec)
        self._replay = None if spec.replay == "none" else ReplayServer(self._context, spec, self._buffer)

    @property
    def replay_endpoint(self) -> str | None:
        return None if self._replay is None else self._replay.endpoint

    def publish(self, batch: PublishBatch) -> None:
        seq = wire.encode_seq(batch.seq)
        payload = wire.encode_batch(batch.events, wall_s=time.time(), adapters=self._adapters)
        self.next_seq = batch.seq + 1
        self._buffer.append(batch.seq, payload)
        if self._withholds(batch.seq):
            self.withheld_batches += 1
            return
        self._socket.send_multipart((self._topic_bytes, seq, payload))
        self.sent_batches += 1

    def close(self) -> None:
        """What was sent may still leave for a moment; then both sockets and the thread are gone."""
        self._socket.close(linger=LINGER_MS)
        if self._replay is not None:
            self._replay.stop()
        self._context.term()

    def _attach(self, spec: MockSpec) -> str:
        if spec.events_mode == "connect":
            self._socket.connect(spec.events)
            return spec.events
        return _bind(self._socket, spec.events)


class ReplayBuffer:
    """The last batches, shared by the loop (which appends) and the replay thread (which reads)."""

    def __init__(self, batches: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=batches)
        self._lock = threading.Lock()

    def append(self, seq: int, payload: bytes) -> None:
        with self._lock:
            self._batches.append((seq, payload))

    def since(self, start_seq: int) -> list[tuple[int, bytes]]:
        with self._lock:
            return [entry for entry in self._batches if entry[0] >= start_seq]


class ReplayServer:
    """A ROUTER socket on its own thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: MockSpec, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._topic = spec.topic.encode()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(
            zmq.SNDHWM, 0
        )  # else an answer longer than the mark is cut silently; the buffer bounds it
        self.endpoint = _bind(self._socket, spec.replay)
        self._stop_in = context.socket(zmq.PAIR)
        self._stop_in.bind(STOP_ADDRESS)
        self._stop_out = context.socket(zmq.PAIR)
        self._stop_out.connect(STOP_ADDRESS)
        self._thread = threading.Thread(target=self._serve, name="replay", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop_out.send(b"")
        self._thread.join()
        self._stop_out.close(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_in, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_in in ready:
                break
            self._answer(self._socket.recv_multipart())
        self._socket.close(linger=LINGER_MS)
        self._stop_in.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
            log.warning("replay request with %d frames ignored: expected [empty, 8-byte start]", len(frames) - 1)
            return
        client = frames[0]
        for seq, payload in self._buffer.since(int.from_bytes(frames[2], "big")):
            self._socket.send_multipart((client, b"", self._topic, wire.encode_seq(seq), payload))
        self._socket.send_multipart((client, b"", b"", wire.REPLAY_END_SEQ, b""))


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind and say the address with its real port."""
    for left in reversed(range(LISTEN_TRIES)):
        try:
            socket.bind(f"tcp://127.0.0.1:{spare_port()}" if endpoint == "auto" else endpoint)
            break
        except zmq.ZMQError as problem:
            if endpoint != "auto" or not left or problem.errno != zmq.EADDRINUSE:
                raise
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
