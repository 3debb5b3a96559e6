"""Asks a worker for event messages that it still has.

The worker answers one request with many messages and an end marker. A request without the empty first frame is ignored
there, and so is everything while its publisher thread is busy: hence the deadline, and no answer is an answer.
Replies are not filtered by topic there, so they are here: a topic that matches nothing must not pass for an empty
history. SGLang before 0.5.22 leaves the topic out of its replies; they are all taken then.
"""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio
from msgspec import Struct

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES
MAX_MESSAGES = 200_000


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
    """Never raises for what the worker does; partial answers are no answer, for a hole in them would be unseen."""
    socket = zmq.asyncio.Socket(context, zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        socket.connect(endpoint)
        await socket.send_multipart([b"", from_seq.to_bytes(SEQ_BYTES, "big")])
        async with asyncio.timeout(timeout_s):
            return await _until_end(socket, topic.encode())
    except TimeoutError:
        return NoReplay(f"no complete answer within {timeout_s:g} s")
    except zmq.ZMQError as error:
        return NoReplay(str(error))
    finally:
        socket.close(linger=0)


async def _until_end(socket: zmq.asyncio.Socket, topic: bytes) -> Replayed | NoReplay:
    messages: list[tuple[int, bytes]] = []
    foreign_topic: bytes | None = None
    for _ in range(MAX_MESSAGES):
        frames = await socket.recv_multipart()
        if len(frames) not in (3, 4) or len(frames[-2]) != SEQ_BYTES:
            return NoReplay(f"malformed answer of {len(frames)} frames")
        seq, payload = frames[-2:]
        if seq == END_SEQ:
            return _whole(messages, topic, foreign_topic)
        if len(frames) == 3 or frames[1].startswith(topic):
            messages.append((int.from_bytes(seq, "big"), payload))
        else:
            foreign_topic = frames[1]
    return NoReplay(f"more than {MAX_MESSAGES} messages")


def _whole(messages: list[tuple[int, bytes]], topic: bytes, foreign_topic: bytes | None) -> Replayed | NoReplay:
    if foreign_topic is not None and not messages:
        subscribed = topic.decode("utf-8", "replace")
        published = foreign_topic.decode("utf-8", "replace")
        return NoReplay(f"its events have topic `{published}`, subscribed is `{subscribed}`", foreign_topic=True)
    return Replayed(tuple(messages))
