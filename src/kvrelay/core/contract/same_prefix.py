"""Where two prompts part: the first token that differs, and how many whole blocks before it can be shared."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.model.prompt import TokenIds


class Parting(Struct, frozen=True, kw_only=True):
    """`at_token`: the place of the first token that differs, counted from 0; None when one prompt begins with the whole
    other one. `shared_blocks` have equal keys in both chains; every later block has not."""

    at_token: int | None
    left_tokens: int
    right_tokens: int
    shared_tokens: int
    shared_blocks: int
    block_size_tokens: int
    same_chain: bool  # all blocks of the shorter prompt have the keys of the longer one's


def parting(left: TokenIds, right: TokenIds, *, block_size_tokens: int) -> Parting:
    length = min(len(left), len(right))
    differing = np.flatnonzero(np.asarray(left[:length]) != np.asarray(right[:length]))
    at_token = int(differing[0]) if differing.size else None
    keyer = Keyer(b"same prefix")
    one, other = (keyer.prompt_keys(ids, block_size_tokens) for ids in (left, right))
    blocks = min(len(one), len(other))
    unequal = np.flatnonzero(one[:blocks] != other[:blocks])
    shared_blocks = int(unequal[0]) if unequal.size else blocks
    shared_tokens = length if at_token is None else at_token
    assert shared_blocks == min(shared_tokens // block_size_tokens, blocks), (shared_blocks, shared_tokens)
    return Parting(
        at_token=at_token,
        left_tokens=len(left),
        right_tokens=len(right),
        shared_tokens=shared_tokens,
        shared_blocks=shared_blocks,
        block_size_tokens=block_size_tokens,
        same_chain=shared_blocks == blocks,
    )
