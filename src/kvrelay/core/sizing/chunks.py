"""Chunk sizes of a store: small ones match more of a prompt, large ones cost less around the payload.

A trace knows its prompts by blocks of its own size. Chunks that are a whole number of its blocks are exact. Smaller
ones are exact as well for what blocks as a whole share, and understate the rest: how far two prompts agree inside a
block that differs, no trace tells.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.model.arrays import Ints


class Chunked(Struct, frozen=True, eq=False):
    """The chunks of all requests one after the other, numbered densely.

    Request r has `chunks[starts[r]:starts[r + 1]]`.
    """

    chunk_tokens: int
    chunks: Ints
    starts: Ints
    distinct: int


def fits(chunk_tokens: int, block_tokens: int) -> bool:
    """Whether one is a whole number of the other."""
    return chunk_tokens % block_tokens == 0 or block_tokens % chunk_tokens == 0


def rechunk(blocks: Ints, starts: Ints, input_tokens: Ints, *, block_tokens: int, chunk_tokens: int) -> Chunked:
    """`blocks` hold partial last ones too, as far as the trace lists them; only full chunks come out."""
    assert fits(chunk_tokens, block_tokens), (chunk_tokens, block_tokens)
    lengths = np.diff(starts)
    full = np.minimum(input_tokens // chunk_tokens, lengths * block_tokens // chunk_tokens)
    chunk_starts = np.concatenate([[0], np.cumsum(full)])
    within = np.arange(int(chunk_starts[-1])) - np.repeat(chunk_starts[:-1], full)
    begins = np.repeat(starts[:-1], full)
    if chunk_tokens >= block_tokens:
        ratio = chunk_tokens // block_tokens
        names = blocks[begins + (within + 1) * ratio - 1]  # a block stands for the whole chain before it
    else:
        ratio = block_tokens // chunk_tokens
        names = blocks[begins + within // ratio] * ratio + within % ratio
    distinct, numbers = np.unique(names, return_inverse=True)
    return Chunked(chunk_tokens, numbers.astype(np.int64), chunk_starts.astype(np.int64), len(distinct))


class ChunkRow(Struct, frozen=True):
    """`objects` fit into the room; `transfer_efficiency` is the share of a fetch's time that moves payload, if every
    object costs one latency."""

    chunk_tokens: int
    hit_tokens: float
    hit_ratio: float
    objects: int
    metadata_bytes: float
    transfer_efficiency: float


def transfer_efficiency(chunk_bytes: float, *, bytes_per_s: float, latency_s: float) -> float:
    payload_s = chunk_bytes / bytes_per_s
    return payload_s / (payload_s + latency_s)
