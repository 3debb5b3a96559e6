"""Messages of the agent protocol: there and back, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvrelay.core.index.replica import Replica
from kvrelay.core.index.residency import Residency
from kvrelay.core.model.units import Tier
from kvrelay.edge.agent import wire
from tests.core.index.worlds import KEYER, SIZE, removed, stored


def test_heads_there_and_back():
    beat = wire.Heartbeat(
        wire.VERSION, "http://w", "i", True, "tcp://s", 1.0, [wire.RankBeat(0, 7, 3, 2**64 - 1, True)]
    )
    head = wire.SnapshotHead(wire.VERSION, None, 0, -1, False)
    for message in (beat, head, wire.SnapshotRequest(wire.VERSION, 1), wire.Refusal(wire.VERSION, "why")):
        assert wire.decode(wire.encode(message)) == message


def test_a_snapshot_there_and_back_gives_the_same_index():
    replica, index = Replica(max_blocks=10_000), Residency(KEYER)
    index.add_holder(SIZE)
    for event in (
        stored([1, 2, 3], adapter="x", salt="s", media=(None, "m", None)),
        stored([4], tier=Tier.CPU),
        stored([4]),
        stored([4]),
        stored(list(range(100, 700))),
        removed([1]),
    ):
        replica.apply(event)
    pieces = list(wire.encode_pieces(replica.snapshot()))
    for piece in pieces:
        for event in wire.decode_piece(piece):
            assert len(event.hashes) <= wire.PIECE_BLOCKS
            index.apply(0, event)
    assert index.census(0) == replica.census() and len(pieces) == 3


@pytest.mark.covers("S16")
@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (b"", "not a message of an agent"),
        (b"\x80\x04\x95cposix\nsystem\n.", "not a message of an agent"),
        (msgspec.msgpack.encode({"type": "heartbeat", "version": 2}), "speaks version 2 of the agent protocol; known"),
        (msgspec.msgpack.encode({"type": "heartbeat", "version": 1}), "not a message of an agent: Object missing"),
        (msgspec.msgpack.encode({"type": "other", "version": 1}), "not a message of an agent: Invalid value 'other'"),
    ],
)
def test_heads_that_are_refused(frame, complaint):
    with pytest.raises(wire.AgentMessageError, match=complaint):
        wire.decode(frame)


@pytest.mark.covers("S16")
@pytest.mark.parametrize(
    "change",
    [
        {"hashes": []},
        {"hashes": [-1, 2]},
        {"parent": 2**64},
        {"token_bytes": b"123"},
        {"block_size_tokens": 0},
        {"tier": "floppy"},
    ],
)
def test_chains_that_are_refused(change):
    good = {"hashes": [1, 2], "parent": None, "token_bytes": bytes(32), "block_size_tokens": 4}
    good |= {"adapter": None, "salt": None, "media": None, "tier": "gpu"}
    assert len(wire.decode_piece(msgspec.msgpack.encode([list(good.values())]))) == 1
    with pytest.raises(wire.AgentMessageError):
        try:
            frame = msgspec.msgpack.encode([list((good | change).values())])
        except OverflowError:
            raise wire.AgentMessageError("msgpack itself has no such number") from None
        wire.decode_piece(frame)


def test_tokens_survive_whatever_their_type():
    event = msgspec.structs.replace(stored([1]), token_ids=np.arange(SIZE, dtype=np.int64))
    (back,) = wire.decode_piece(next(wire.encode_pieces([event])))
    assert back.token_ids is not None and back.token_ids.tolist() == list(range(SIZE))
