"""vLLM's KV event messages, decoded into the router's events.

A payload is the msgpack array `[ts, events, dp_rank]`. Current releases send every event as a map with a `type`, hashes
as unsigned integers; earlier ones sent arrays with the type first, and hashes may be signed or raw bytes. Typed
decoding covers the current form at several times the speed; whatever it does not fit goes through the general path,
so the two must agree (`tests/edge/connectors/vllm/test_events.py` holds them against each other).

Consecutive removals are merged: vLLM sends one event per removed block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, BlocksStored, EventsSkipped, KvEvent
from kvrelay.core.model.prompt import TokenIds
from kvrelay.core.model.units import Tier
from kvrelay.edge.connectors.base import DecodedBatch, MalformedEvents
from kvrelay.edge.system.unreadable import UNREADABLE

MAX_PAYLOAD_BYTES = 64 * 2**20
MAX_BLOCK_TOKENS = 65_536
MAX_RANK = 4095
_HASH_MASK = 2**64 - 1
_TIERS = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "STORAGE": Tier.DISK,
    "CPU_PINNED": Tier.CPU,  # from here on SGLang's words
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.REMOTE,
}


class _Stored(Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    cache_salt: str | None = None  # SGLang's form; vLLM has it in `extra_keys`


class _Removed(Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _Batch(Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    dp_rank: int | None = 0


Members = dict[str, Any]
Positions = Mapping[str, Sequence[str]]

# Positions in the older array form, after the type; later members may be left out.
POSITIONS: Positions = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_STRUCTS: dict[str, Callable[[Members], Any]] = {
    "BlockStored": lambda members: msgspec.convert(members, _Stored),
    "BlockRemoved": lambda members: msgspec.convert(members, _Removed),
    "AllBlocksCleared": lambda members: _Cleared(),
}

# Kinds of caches (`kv_cache_spec_kind`).
_WHOLE_PREFIX_KINDS = frozenset(("full_attention", "mla_attention", "sink_full_attention"))
_OTHER_KINDS = frozenset(
    (
        "sliding_window",
        "sliding_window_mla",
        "chunked_local_attention",
        "mamba",
        "encoder_only_attention",
        "cross_attention",
    )
)

_decode_typed = msgspec.msgpack.Decoder(_Batch).decode


class EventDecoder:
    """For engines that speak this format: each has its own `positions` of the array form.

    `adjust` turns members of an event that the typed form does not fit into those of vLLM.
    """

    def __init__(self, positions: Positions, adjust: Callable[[Members], Members]) -> None:
        self._positions = positions
        self._adjust = adjust

    def decode(self, payload: bytes) -> DecodedBatch:
        """One message. Raises MalformedEvents; what is well-formed but not for us comes out as EventsSkipped."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise MalformedEvents(f"{len(payload)} bytes in one message")
        try:
            batch = _decode_typed(payload)
        except (msgspec.ValidationError, ValueError):
            return self.decode_general(payload)
        except UNREADABLE as error:
            raise MalformedEvents(f"not msgpack: {error}") from error
        return DecodedBatch(_rank(batch.dp_rank), _translated(batch.events), batch.ts)

    def decode_general(self, payload: bytes) -> DecodedBatch:
        """The same for every form that is known, slowly."""
        try:
            parts = msgspec.msgpack.decode(payload)
            if not isinstance(parts, list) or len(parts) < 2 or not isinstance(parts[1], list):
                raise MalformedEvents("a message is [ts, events, dp_rank]")
            events = _translated(map(self._wire_event, parts[1]))
            return DecodedBatch(_rank(parts[2] if len(parts) > 2 else 0), events, msgspec.convert(parts[0], float))
        except (*UNREADABLE, ValueError) as error:
            raise MalformedEvents(str(error)) from error

    def _wire_event(self, raw: object) -> _Stored | _Removed | _Cleared | EventsSkipped:
        if isinstance(raw, dict):
            kind, members = raw.get("type"), raw
        elif isinstance(raw, list) and raw:
            kind = raw[0]
            members = dict(zip(self._positions.get(str(kind), ()), raw[1:], strict=False))
        else:
            raise MalformedEvents("an event is a map or an array")
        if kind not in _STRUCTS:
            return EventsSkipped("unknown_type")
        event: _Stored | _Removed | _Cleared = _STRUCTS[str(kind)](self._adjust(_with_integer_hashes(members)))
        return event


DECODER = EventDecoder(POSITIONS, adjust=lambda members: members)
decode_batch = DECODER.decode


def _with_integer_hashes(members: Members) -> Members:
    for name in ("block_hashes", "parent_block_hash"):
        if name in members:
            members = {**members, name: _integers(members[name])}
    return members


def _rank(dp_rank: object) -> int:
    if dp_rank is None:
        return 0
    if not isinstance(dp_rank, int) or not 0 <= dp_rank <= MAX_RANK:
        raise MalformedEvents(f"dp_rank {dp_rank!r}")
    return dp_rank


def _integers(hashes: object) -> object:
    if isinstance(hashes, list):
        return [_integers(one) for one in hashes]
    if isinstance(hashes, bytes):
        return int.from_bytes(hashes[-8:], "big")
    return hashes


def _translated(wire: Iterable[_Stored | _Removed | _Cleared | EventsSkipped]) -> tuple[KvEvent, ...]:
    events: list[KvEvent] = []
    removed: list[int] = []
    removed_tier = Tier.GPU
    for event in wire:
        if type(event) is _Removed:
            tier = _tier(event.medium, event.locality)
            skipped = _why_skipped(event.group_idx, tier)
            if skipped is None:
                assert tier is not None
                if removed and tier is not removed_tier:
                    events.append(BlocksRemoved(_unsigned(removed), removed_tier))
                    removed = []
                removed_tier = tier
                removed += event.block_hashes
                continue
            translated: KvEvent = skipped
        elif type(event) is _Stored:
            translated = _stored(event)
        elif type(event) is _Cleared:
            translated = BlocksCleared()
        else:
            assert isinstance(event, EventsSkipped)
            translated = event
        if removed:
            events.append(BlocksRemoved(_unsigned(removed), removed_tier))
            removed = []
        events.append(translated)
    if removed:
        events.append(BlocksRemoved(_unsigned(removed), removed_tier))
    return tuple(events)


def _stored(event: _Stored) -> BlocksStored | EventsSkipped:
    tier = _tier(event.medium, event.locality)
    skipped = _why_skipped(event.group_idx, tier, event.kv_cache_spec_kind)
    if skipped is not None:
        return skipped
    blocks = len(event.block_hashes)
    if not 0 < event.block_size <= MAX_BLOCK_TOKENS:
        raise MalformedEvents(f"block_size {event.block_size}")
    if event.token_ids and len(event.token_ids) != blocks * event.block_size:
        return EventsSkipped("partial_block")
    assert tier is not None
    adapter, salt, media = _extra_keys(event)
    parent = event.parent_block_hash
    return BlocksStored(
        hashes=_unsigned(event.block_hashes),
        parent=None if parent is None else parent & _HASH_MASK,
        token_ids=_token_array(event.token_ids),
        block_size_tokens=event.block_size,
        adapter=adapter,
        salt=salt,
        media=media,
        tier=tier,
    )


def _token_array(token_ids: list[int]) -> TokenIds | None:
    if not token_ids:
        return None
    try:
        return np.frombuffer(array("I", token_ids), dtype=np.uint32)
    except OverflowError as error:
        raise MalformedEvents("a token id is not an unsigned 32-bit number") from error


def _unsigned(hashes: list[int]) -> tuple[int, ...]:
    if hashes and min(hashes) < 0:
        return tuple(one & _HASH_MASK for one in hashes)
    return tuple(hashes)


def _tier(medium: str | None, locality: str | None) -> Tier | None:
    """None: a medium that we do not know."""
    tier = _TIERS.get(medium)
    return Tier.REMOTE if tier is Tier.DISK and locality == "REMOTE" else tier


def _why_skipped(group_idx: int | None, tier: Tier | None, kind: str | None = None) -> EventsSkipped | None:
    """Only the first cache group is indexed: hybrid models repeat every token span once per group. And only kinds whose
    block serves every prompt that begins like it: a sliding window forgets what is behind it."""
    if group_idx:
        return EventsSkipped("cache_group" if kind is None else f"cache_group_{_named(kind)}")
    if kind is not None and kind not in _WHOLE_PREFIX_KINDS:
        return EventsSkipped(f"cache_kind_{_named(kind)}")
    if tier is None:
        return EventsSkipped("medium")
    return None


def _named(kind: str) -> str:
    """It becomes the label of a counter, so only known names pass."""
    return kind if kind in _WHOLE_PREFIX_KINDS or kind in _OTHER_KINDS else "unknown"


def _extra_keys(event: _Stored) -> tuple[str | None, str | None, tuple[str | None, ...] | None]:
    """Adapter, salt and media digests, taken apart.

    The engine lists per block: the adapter's name, one `[digest, offset]` per multimodal input, and on the first
    block of a chain the salt. Earlier releases sent bare digests; one that stands last on a first block cannot be told
    from a salt and is read as one, which costs hits and never invents any.
    """
    adapter = event.lora_name
    if adapter is None and event.lora_id:
        adapter = f"lora_id:{event.lora_id}"
    if event.extra_keys is None or not any(event.extra_keys):
        return adapter, event.cache_salt if event.parent_block_hash is None else None, None
    if len(event.extra_keys) != len(event.block_hashes):
        raise MalformedEvents("extra_keys has another length than block_hashes")
    salt: str | None = None
    media: list[str | None] = []
    for position, keys in enumerate(event.extra_keys):
        rest = list(keys or ())
        if adapter is not None and rest and rest[0] == adapter:
            del rest[0]
        if position == 0 and event.parent_block_hash is None and rest and isinstance(rest[-1], str):
            salt = rest.pop()
        media.append("|".join(map(str, rest)) if rest else None)
    return adapter, salt, tuple(media) if any(media) else None
