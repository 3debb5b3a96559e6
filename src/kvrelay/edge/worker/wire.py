"""vLLM's KV event wire format, sending side: `[ts, events, dp_rank]` in msgpack, each event a map with `type`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec
from msgspec import Struct

from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, BlocksStored, EventsSkipped, KvEvent

MEDIUM = "GPU"
REPLAY_END_SEQ = b"\xff" * 8


class BlockStored(Struct, tag="BlockStored", tag_field="type"):
    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None]
    group_idx: int
    kv_cache_spec_kind: str


class BlockRemoved(Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: tuple[int, ...]
    medium: str
    group_idx: int


class AllBlocksCleared(Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class Batch(Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    dp_rank: int


_encoder = msgspec.msgpack.Encoder()


def encode_batch(events: Sequence[KvEvent], *, wall_s: float, adapters: Sequence[str], dp_rank: int = 0) -> bytes:
    """The payload frame."""
    return _encoder.encode(Batch(wall_s, [_event(event, adapters) for event in events], dp_rank))


def encode_seq(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def _event(event: KvEvent, adapters: Sequence[str]) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match event:
        case BlocksStored():
            return _stored(event, adapters)
        case BlocksRemoved():
            return BlockRemoved(event.hashes, MEDIUM, 0)
        case BlocksCleared():
            return AllBlocksCleared()
        case EventsSkipped():
            raise AssertionError("an engine skips no events")
    assert_never(event)


def _stored(event: BlocksStored, adapters: Sequence[str]) -> BlockStored:
    assert event.token_ids is not None, "an engine knows the tokens of what it computes"
    return BlockStored(
        block_hashes=event.hashes,
        parent_block_hash=event.parent,
        token_ids=event.token_ids.tolist(),
        block_size=event.block_size_tokens,
        lora_id=None if event.adapter is None else adapters.index(event.adapter) + 1,
        medium=MEDIUM,
        lora_name=event.adapter,
        extra_keys=_extra_keys(event),
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def _extra_keys(event: BlocksStored) -> list[list[str] | None]:
    """The adapter's name on every block, the salt (in the clear) on the first block of a chain only."""
    common = [] if event.adapter is None else [event.adapter]
    keys: list[list[str] | None] = [common or None] * len(event.hashes)
    if event.salt is not None:
        keys[0] = [*common, event.salt]
    return keys
