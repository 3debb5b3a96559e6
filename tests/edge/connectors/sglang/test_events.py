"""SGLang's KV events, from payloads that its own classes encoded (`frames.py`). No SGLang server ran."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, BlocksStored, EventsSkipped, KvEvent
from kvrelay.core.model.units import Tier
from kvrelay.edge.connectors.base import MalformedEvents
from kvrelay.edge.connectors.sglang.events import decode_batch
from tests.edge.connectors.sglang.frames import ARRAYS, MAPS

FORMS = pytest.mark.parametrize("frames", [ARRAYS, MAPS], ids=["arrays-0.5.19", "maps-0.5.23"])
Frames = dict[str, bytes]


def the_only(payload: bytes) -> KvEvent:
    (event,) = decode_batch(payload).events
    return event


def stored(payload: bytes) -> BlocksStored:
    event = the_only(payload)
    assert isinstance(event, BlocksStored)
    return event


def tokens(event: BlocksStored) -> list[int]:
    assert event.token_ids is not None
    result: list[int] = event.token_ids.tolist()
    return result


@FORMS
@pytest.mark.covers("TP-02")
def test_signed_hashes_become_the_unsigned_ones_of_the_index(frames: Frames) -> None:
    event = stored(frames["stored"])
    assert (event.hashes, event.parent) == ((2**64 - 2, 7), None)
    assert tokens(event) == [10, 11, 12, 130_000]
    assert (event.block_size_tokens, event.adapter, event.salt, event.tier) == (2, None, None, Tier.GPU)


@FORMS
@pytest.mark.covers("TP-02")
def test_a_child_names_its_parent_and_the_batch_its_rank(frames: Frames) -> None:
    assert decode_batch(frames["child"]).rank == 3
    event = stored(frames["child"])
    assert (event.hashes, event.parent, tokens(event)) == ((2**64 - 9,), 2**64 - 2, [5, 6])


@FORMS
@pytest.mark.covers("TP-02")
@pytest.mark.parametrize(("name", "tier"), [("cpu", Tier.CPU), ("disk", Tier.DISK), ("external", Tier.REMOTE)])
def test_media_of_hicache_are_tiers(frames: Frames, name: str, tier: Tier) -> None:
    assert stored(frames[name]).tier is tier


@FORMS
@pytest.mark.covers("TP-02")
def test_what_goes_goes_from_its_tier(frames: Frames) -> None:
    assert the_only(frames["removed"]) == BlocksRemoved((2**64 - 2, 7))
    assert the_only(frames["removed_cpu"]) == BlocksRemoved((7,), Tier.CPU)
    assert the_only(frames["cleared"]) == BlocksCleared()


@FORMS
@pytest.mark.covers("TP-02")
def test_a_salt_comes_as_metadata_or_as_a_member(frames: Frames) -> None:
    assert stored(frames["salted"]).salt == "pepper"


@FORMS
@pytest.mark.covers("TP-02")
def test_pairs_of_eagle_are_the_tokens_of_the_page(frames: Frames) -> None:
    assert tokens(stored(frames["bigram"])) == [10, 11, 12, 130_000]


@pytest.mark.covers("TP-02")
def test_an_adapter_has_its_name_where_the_release_says_it() -> None:
    assert stored(MAPS["adapter"]).adapter == "ad1"


def test_a_page_of_one_token_is_a_block_like_any_other() -> None:
    event = stored(msgspec.msgpack.encode([1.0, [["BlockStored", [1, 2, 3], None, [7, 8, 9], 1, None, "GPU"]]]))
    assert (event.hashes, event.block_size_tokens, tokens(event)) == ((1, 2, 3), 1, [7, 8, 9])


def array_form(*changed: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, [["BlockStored", *changed]], 0])


@pytest.mark.parametrize(
    "payload",
    [
        array_form([1], None, [[1, 2], "x"], 2, None, "GPU"),
        array_form([1], None, [[], []], 2, None, "GPU"),
        array_form([1], None, [1, 2], 2, None, "GPU", {"cache_salt": 5}),
        array_form([1], None, [1, -2], 2, None, "GPU"),
        array_form([1]),
    ],
)
def test_what_its_classes_would_not_encode_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedEvents):
        decode_batch(payload)


def test_a_medium_of_a_later_release_is_skipped_and_counted() -> None:
    assert the_only(array_form([1], None, [1, 2], 2, None, "CXL")) == EventsSkipped("medium")
