"""Wire messages written by hand from the format's description, current and older forms."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, BlocksStored, EventsSkipped
from kvrelay.core.model.units import Tier
from kvrelay.edge.connectors.base import MalformedEvents
from kvrelay.edge.connectors.vllm import events
from kvrelay.edge.connectors.vllm.events import decode_batch


def message(*wire_events: object, tail: tuple[object, ...] = (0,)) -> bytes:
    return msgspec.msgpack.encode([1764.25, list(wire_events), *tail])


def stored(**changes: object) -> dict[str, Any]:
    """As a current server sends it."""
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, 7],
        "parent_block_hash": None,
        "token_ids": [10, 11, 12, 130_000],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return {**event, **changes}


def the_only(payload: bytes) -> Any:
    batch = decode_batch(payload)
    assert len(batch.events) == 1
    return batch.events[0]


def as_values(event: Any) -> Any:
    if isinstance(event, BlocksStored):
        tokens = None if event.token_ids is None else event.token_ids.tolist()
        return (
            event.hashes,
            event.parent,
            tokens,
            event.block_size_tokens,
            event.adapter,
            event.salt,
            event.media,
            event.tier,
        )
    return event


def test_the_current_form_of_a_stored_event() -> None:
    event = the_only(message(stored()))
    assert isinstance(event, BlocksStored)
    assert event.token_ids is not None and event.token_ids.dtype == np.uint32
    assert as_values(event) == ((2**64 - 1, 7), None, [10, 11, 12, 130_000], 2, None, None, None, Tier.GPU)


def test_a_first_byte_as_seen_on_the_wire() -> None:
    assert message(stored())[0] == 0x93


@pytest.mark.parametrize("tail", [(), (0,), (None,)])
def test_the_rank_may_be_left_out(tail: tuple[object, ...]) -> None:
    assert decode_batch(message(stored(), tail=tail)).rank == 0


def test_the_rank_and_unknown_members_after_it() -> None:
    assert decode_batch(message({"type": "AllBlocksCleared"}, tail=(3, "later"))).rank == 3


def test_the_older_array_form_means_the_same() -> None:
    array_form = ["BlockStored", [2**64 - 1, 7], None, [10, 11, 12, 130_000], 2, None, "GPU"]
    assert as_values(the_only(message(array_form))) == as_values(the_only(message(stored())))
    assert the_only(message(["BlockRemoved", [5]])) == BlocksRemoved((5,))
    assert the_only(message(["AllBlocksCleared"])) == BlocksCleared()


@pytest.mark.parametrize(
    ("on_the_wire", "ours"),
    [
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (bytes(24) + (2**64 - 2).to_bytes(8, "big"), 2**64 - 2),
    ],
)
def test_hashes_come_as_integers_of_either_sign_or_as_bytes(on_the_wire: object, ours: int) -> None:
    event = the_only(message(stored(block_hashes=[on_the_wire, 7], parent_block_hash=on_the_wire)))
    assert (event.hashes, event.parent) == ((ours, 7), ours)
    assert the_only(message({"type": "BlockRemoved", "block_hashes": [on_the_wire]})) == BlocksRemoved((ours,))


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        ("GPU", None, Tier.GPU),
        (None, None, Tier.GPU),
        ("CPU", None, Tier.CPU),
        ("STORAGE", None, Tier.DISK),
        ("STORAGE", "REMOTE", Tier.REMOTE),
    ],
)
def test_media_are_tiers(medium: str | None, locality: str | None, tier: Tier) -> None:
    assert the_only(message(stored(medium=medium, locality=locality))).tier is tier


def test_a_copy_in_another_tier_may_come_without_tokens() -> None:
    event = the_only(message(stored(medium="CPU", token_ids=[])))
    assert event.token_ids is None and event.hashes == (2**64 - 1, 7)


def test_an_adapter_is_named_on_every_block() -> None:
    event = the_only(message(stored(lora_id=1, lora_name="ad1", extra_keys=[["ad1"], ["ad1"]])))
    assert (event.adapter, event.salt, event.media) == ("ad1", None, None)


def test_a_salt_is_on_the_first_block_of_a_chain_only() -> None:
    event = the_only(message(stored(extra_keys=[["pepper"], None])))
    assert (event.adapter, event.salt, event.media) == (None, "pepper", None)


def test_an_adapter_named_like_the_salt_is_not_the_salt() -> None:
    event = the_only(message(stored(lora_id=1, lora_name="x", extra_keys=[["x", "x"], ["x"]])))
    assert (event.adapter, event.salt) == ("x", "x")


def test_media_digests_stay_with_their_blocks() -> None:
    event = the_only(message(stored(extra_keys=[[["img1", 0]], [["img1", -2], ["img2", 1]]], parent_block_hash=3)))
    assert event.salt is None
    assert event.media == ("['img1', 0]", "['img1', -2]|['img2', 1]")


def test_removals_are_merged_in_order_and_by_tier() -> None:
    def removed(one: int, medium: str) -> dict[str, object]:
        return {"type": "BlockRemoved", "block_hashes": [one], "medium": medium, "group_idx": 0}

    batch = decode_batch(
        message(
            removed(1, "GPU"), removed(2, "GPU"), removed(3, "CPU"), {"type": "AllBlocksCleared"}, removed(4, "GPU")
        )
    )
    assert batch.events == (
        BlocksRemoved((1, 2)),
        BlocksRemoved((3,), Tier.CPU),
        BlocksCleared(),
        BlocksRemoved((4,)),
    )


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (stored(group_idx=1), "cache_group_full_attention"),
        (stored(group_idx=1, kv_cache_spec_kind="mamba", token_ids=[1]), "cache_group_mamba"),
        (stored(group_idx=1, kv_cache_spec_kind="of a later release"), "cache_group_unknown"),
        (stored(group_idx=1, kv_cache_spec_kind=None), "cache_group"),
        ({"type": "BlockRemoved", "block_hashes": [1], "group_idx": 2}, "cache_group"),
        (stored(kv_cache_spec_kind="sliding_window"), "cache_kind_sliding_window"),
        (stored(token_ids=[1, 2, 3]), "partial_block"),
        (stored(medium="TAPE"), "medium"),
        ({"type": "BlockPromoted", "block_hashes": [1]}, "unknown_type"),
    ],
)
def test_what_is_understood_well_enough_to_skip_is_counted(event: dict[str, object], kind: str) -> None:
    batch = decode_batch(message(event, {"type": "AllBlocksCleared"}))
    assert batch.events == (EventsSkipped(kind), BlocksCleared())


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_caches_whose_blocks_serve_every_prompt_that_begins_alike_are_indexed(kind: str | None) -> None:
    assert isinstance(the_only(message(stored(kv_cache_spec_kind=kind))), BlocksStored)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        message(stored())[:-3],
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, "events", 0]),
        message(7),
        message([]),
        message(stored(block_size=0)),
        message(stored(block_size="two")),
        message(stored(token_ids=[1, 2, 3, -4])),
        message(stored(token_ids=[1, 2, 3, 2**32])),
        message(stored(extra_keys=[["a"]])),
        message({"type": "BlockStored"}),
        message(stored(), tail=(-1,)),
        message(stored(), tail=(10**9,)),
        message(stored(), tail=("zero",)),
    ],
)
def test_malformed_messages_are_one_kind_of_error(payload: bytes) -> None:
    with pytest.raises(MalformedEvents):
        decode_batch(payload)


def test_a_message_beyond_the_bound_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_PAYLOAD_BYTES", 10)
    with pytest.raises(MalformedEvents, match="bytes in one message"):
        decode_batch(message(stored()))


@given(st.binary(max_size=300))
def test_any_bytes_are_decoded_or_malformed(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except MalformedEvents:
        pass


WIRE_EVENTS = st.one_of(
    st.builds(
        lambda hashes, parent, medium, group: stored(
            block_hashes=hashes,
            parent_block_hash=parent,
            medium=medium,
            group_idx=group,
            token_ids=list(range(2 * len(hashes))),
            extra_keys=None,
        ),
        st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4),
        st.none() | st.integers(-(2**63), 2**64 - 1),
        st.sampled_from(["GPU", "CPU", "STORAGE", None]),
        st.sampled_from([None, 0, 1]),
    ),
    st.builds(
        lambda hashes: {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"},
        st.lists(st.integers(0, 2**64 - 1), max_size=3),
    ),
    st.just({"type": "AllBlocksCleared"}),
)


@given(st.lists(WIRE_EVENTS, max_size=5))
def test_the_quick_and_the_general_path_agree(wire: list[dict[str, Any]]) -> None:
    payload = message(*wire)
    quick = decode_batch(payload)
    general = events.DECODER.decode_general(payload)
    assert [as_values(event) for event in quick.events] == [as_values(event) for event in general.events]
