"""What an agent and a router say to each other, in msgpack over ZMQ. `version` comes first in every message.

Heartbeat (PUB): two frames, `TOPIC` and a `Heartbeat`. It names the endpoint where snapshots are served.
Snapshot (ROUTER): a request is `[empty, SnapshotRequest]`, the one reply to it `[empty, head, piece, piece, ...]`,
where the head is a `SnapshotHead` or a `Refusal` and every piece is an array of `Chain`s, few enough to be decoded
between two other callbacks of an event loop.

Token ids travel as they are: block keys are made with a secret of each router. So this socket is as confidential as the
engine's own event socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.model.events import BlocksStored
from kvrelay.core.model.units import Tier
from kvrelay.edge.system.unreadable import UNREADABLE

VERSION = 1
TOPIC = b"kvrelay-agent"
PIECE_BLOCKS = 500
MAX_FRAME_BYTES = 64 * 2**20


class AgentMessageError(Exception):
    """A message that is not of this protocol, or of another version of it."""


class RankBeat(Struct, array_like=True):
    rank: int
    last_seq: int
    blocks: int
    digest: int
    whole: bool


class Heartbeat(Struct, tag="heartbeat", frozen=True):
    version: int
    worker_url: str
    incarnation: str | None  # None: this worker cannot tell one life from the next
    worker_up: bool
    snapshot_endpoint: str
    interval_s: float
    ranks: list[RankBeat]


class SnapshotRequest(Struct, tag="snapshot", frozen=True):
    version: int
    rank: int


class SnapshotHead(Struct, tag="snapshot_head", frozen=True):
    version: int
    incarnation: str | None
    rank: int
    last_seq: int
    whole: bool


class Refusal(Struct, tag="refusal", frozen=True):
    version: int
    reason: str


class Chain(Struct, array_like=True):
    hashes: list[int]
    parent: int | None
    token_bytes: bytes  # uint32, little-endian
    block_size_tokens: int
    adapter: str | None
    salt: str | None
    media: list[str | None] | None
    tier: Tier


class _AnyVersion(Struct):
    version: int


_encode = msgspec.msgpack.Encoder().encode
Head = Heartbeat | SnapshotRequest | SnapshotHead | Refusal
_heads: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)
_pieces = msgspec.msgpack.Decoder(list[Chain])


def encode(message: Head) -> bytes:
    return _encode(message)


def decode(frame: bytes) -> Head:
    """Raises AgentMessageError."""
    try:
        version = msgspec.msgpack.decode(frame, type=_AnyVersion).version
        if version != VERSION:
            raise AgentMessageError(f"speaks version {version} of the agent protocol; known here: {VERSION}")
        return _heads.decode(frame)
    except UNREADABLE as error:
        raise AgentMessageError(f"not a message of an agent: {error}") from error


def encode_pieces(events: Iterable[BlocksStored]) -> Iterator[bytes]:
    """Each a frame of at most `PIECE_BLOCKS` blocks, or one chain."""
    chains: list[Chain] = []
    blocks = 0
    for event in events:
        if chains and blocks + len(event.hashes) > PIECE_BLOCKS:
            yield _encode(chains)
            chains, blocks = [], 0
        chains.append(_chain(event))
        blocks += len(event.hashes)
    if chains:
        yield _encode(chains)


def decode_piece(frame: bytes) -> tuple[BlocksStored, ...]:
    """Raises AgentMessageError."""
    try:
        return tuple(map(_event, _pieces.decode(frame)))
    except UNREADABLE as error:
        raise AgentMessageError(f"not a piece of a snapshot: {error}") from error


def _chain(event: BlocksStored) -> Chain:
    assert event.token_ids is not None, "a replica keeps the tokens of all its blocks"
    return Chain(
        hashes=list(event.hashes),
        parent=event.parent,
        token_bytes=event.token_ids.astype("<u4").tobytes(),
        block_size_tokens=event.block_size_tokens,
        adapter=event.adapter,
        salt=event.salt,
        media=None if event.media is None else list(event.media),
        tier=event.tier,
    )


def _event(chain: Chain) -> BlocksStored:
    blocks, size = len(chain.hashes), chain.block_size_tokens
    if not blocks or size < 1 or len(chain.token_bytes) != blocks * size * 4:
        raise AgentMessageError(f"a chain of {blocks} blocks of {size} tokens with {len(chain.token_bytes)} bytes")
    if any(not 0 <= name < 2**64 for name in (*chain.hashes, chain.parent or 0)):
        raise AgentMessageError("the name of a block is not an unsigned 64-bit number")
    return BlocksStored(
        hashes=tuple(chain.hashes),
        parent=chain.parent,
        token_ids=np.frombuffer(chain.token_bytes, dtype="<u4").astype(np.uint32),
        block_size_tokens=size,
        adapter=chain.adapter,
        salt=chain.salt,
        media=None if chain.media is None else tuple(chain.media),
        tier=chain.tier,
    )
