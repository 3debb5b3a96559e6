"""Asks a worker for event messages that it still has.

The worker answers one request with many messages and an end marker. A request without the empty first frame is ignored
there, and so is everything while its publisher thread is busy: hence the deadline, and no answer is an answer.
Replies are not filtered by topic there, so they are here: a topic that matches nothing must not pass for an empty
history. SGLang before 0.5.22 leaves the topic out of its replies; they are all taken then.

A long answer is cut without a word: the worker's socket holds a thousand messages (ZMQ's default) for somebody who does
not take them as fast as it sends, and throws the next ones away, the end marker too. So who asks notices the hole, or
the silence, and asks again from there, until nothing new comes.
"""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio
from msgspec import Struct

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES
MAX_MESSAGES = 200_000
LONG_ANSWER = 250  # messages; shorter ones fit into any socket
SILENCE_S = 0.25  # in the middle of an answer; it comes out of one loop


class Replayed(Struct, frozen=True):
    """All that the worker still had from the sequence asked for, oldest first."""

    messages: tuple[tuple[int, bytes], ...]


class NoReplay(Struct, frozen=True):
    """The worker did not answer to the end."""

    reason: str
    foreign_topic: bool = False  # it did, but under another topic than the one subscribed to


async def replay(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, topic: str, from_seq: int, timeout_s: float
) -> Replayed | NoReplay:
    """Never raises for what the worker does; an answer without its end is no answer, for what it lacks is not known.

    A hole that stays after it was asked for is the worker's: it does not have these messages any more.
    """
    socket = zmq.asyncio.Socket(context, zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    socket.setsockopt(zmq.RCVHWM, MAX_MESSAGES)
    history = _History(topic.encode(), from_seq)
    try:
        socket.connect(endpoint)
        async with asyncio.timeout(timeout_s):
            return await _whole(socket, history)
    except TimeoutError:
        return NoReplay(f"no complete answer within {timeout_s:g} s")
    except zmq.ZMQError as error:
        return NoReplay(str(error))
    finally:
        socket.close(linger=0)


class _History:
    """What has come so far. `missing`: the first message behind a gapless beginning, maybe the next to be published."""

    def __init__(self, topic: bytes, from_seq: int) -> None:
        self.messages: dict[int, bytes] = {}
        self.missing = from_seq
        self.foreign_topic: bytes | None = None
        self._topic = topic

    def take(self, frames: list[bytes]) -> None:
        if len(frames) == 4 and not frames[1].startswith(self._topic):
            self.foreign_topic = frames[1]
            return
        seq = int.from_bytes(frames[-2], "big")
        if not self.messages:  # what lay before it is gone there
            self.missing = max(self.missing, seq)
        self.messages[seq] = frames[-1]
        while self.missing in self.messages:
            self.missing += 1

    @property
    def has_hole(self) -> bool:
        return bool(self.messages) and self.missing < max(self.messages)

    def end(self) -> Replayed | NoReplay:
        if self.foreign_topic is not None and not self.messages:
            subscribed, published = (topic.decode("utf-8", "replace") for topic in (self._topic, self.foreign_topic))
            return NoReplay(f"its events have topic `{published}`, subscribed is `{subscribed}`", foreign_topic=True)
        return Replayed(tuple(sorted(self.messages.items())))


async def _whole(socket: zmq.asyncio.Socket, history: _History) -> Replayed | NoReplay:
    """Asks for what is missing as long as that brings something. Of a long answer the last messages may have been
    thrown away and its end marker not: there is no other way to know than to ask once more."""
    while True:
        asked, before = history.missing, len(history.messages)
        await socket.send_multipart([b"", asked.to_bytes(SEQ_BYTES, "big")])
        came = await _answer(socket, history)
        if isinstance(came, NoReplay):
            return came
        long = len(history.messages) - before >= LONG_ANSWER
        if came is _END and (history.missing == asked or not (long or history.has_hole)):
            return history.end()


_END, _CUT = "end", "cut"


async def _answer(socket: zmq.asyncio.Socket, history: _History) -> str | NoReplay:
    """One answer, to its end marker or until it falls silent. The first message may take as long as it likes."""
    has_begun = False
    while True:
        try:
            async with asyncio.timeout(SILENCE_S if has_begun else None):
                frames = await socket.recv_multipart()
        except TimeoutError:
            return _CUT
        if len(frames) not in (3, 4) or len(frames[-2]) != SEQ_BYTES:
            return NoReplay(f"malformed answer of {len(frames)} frames")
        if frames[-2] == END_SEQ:
            return _END
        has_begun = True
        history.take(frames)
        if len(history.messages) > MAX_MESSAGES:
            return NoReplay(f"more than {MAX_MESSAGES} messages")
