"""SGLang's KV event messages: vLLM's, with differences.

- Up to 0.5.19 an event is an array; after `medium` follows a map with the salt, and only when there is one.
- From 0.5.20 on it is a map with `cache_salt`, from 0.5.22 on with `lora_name` too. Before that nothing on the wire
  tells the blocks of an adapter from those of the base model: a worker with adapters claims more than it has.
- Hashes are signed 64-bit numbers. A salted chain has hashes of its own.
- With EAGLE a page lists pairs of neighbouring tokens; the first of each pair are the page's tokens.
- Media are GPU, CPU_PINNED, DISK and EXTERNAL. A page is in each tier at most once.
"""

from __future__ import annotations

from kvrelay.edge.connectors.vllm.events import POSITIONS, EventDecoder, Members

_ARRAY_FORM = {
    **POSITIONS,
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "metadata"),
}


def _like_vllms(members: Members) -> Members:
    metadata = members.get("metadata")
    if isinstance(metadata, dict):
        members = {**members, "cache_salt": metadata.get("cache_salt")}
    token_ids = members.get("token_ids")
    if isinstance(token_ids, list) and token_ids and isinstance(token_ids[0], list):
        members = {**members, "token_ids": [_first(pair) for pair in token_ids]}
    return members


def _first(pair: object) -> object:
    return pair[0] if isinstance(pair, list) and pair else pair


decode_batch = EventDecoder(_ARRAY_FORM, adjust=_like_vllms).decode
