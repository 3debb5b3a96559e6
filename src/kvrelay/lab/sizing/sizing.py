"""How large a cache a trace asks for: everything that one pass over it tells."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.cachesim.prefix_trace import PrefixTrace, prefix_trace
from kvrelay.core.sizing.chunks import ChunkRow, fits, rechunk, transfer_efficiency
from kvrelay.core.sizing.cost import CostRow, Prices, cost_row
from kvrelay.core.sizing.curve import (
    HitCurve,
    Knee,
    Step,
    TierHits,
    knee,
    make_curve,
    reuse_histogram,
    table,
    tier_hits,
)
from kvrelay.core.traces.trace import Trace
from kvrelay.lab.sizing.distances import exact_curve, flattened, sampled_curve, stack_distances

CHUNK_TOKENS = (16, 32, 64, 128, 256, 512)
NEAR_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
METADATA_BYTES_PER_OBJECT = 200
MOST_CHUNK_USES = 20_000_000


class SplitRow(Struct, frozen=True):
    """One way to split a fixed amount between a near tier (in host memory) and a far one."""

    near_bytes: float
    far_bytes: float
    hit_tokens: float
    far_read_share: float  # of all hit tokens
    host_memory_bytes: float  # the near tier, and the index of both


class Sizing(Struct, frozen=True, eq=False):
    """Tokens are of prompts, bytes of KV payload; a GB is 1e9 bytes."""

    block_size_tokens: int
    bytes_per_token: float
    requests: int
    input_tokens: int
    distinct_blocks: int
    span_s: float
    curve: HitCurve
    sample_rate: float  # 1: exact
    knee: Knee | None
    steps: tuple[Step, ...]
    histogram: tuple[tuple[int, float], ...]
    tiers: tuple[TierHits, ...]
    splits: tuple[SplitRow, ...]
    chunks: tuple[ChunkRow, ...]
    skipped_chunks: tuple[str, ...]
    costs: tuple[CostRow, ...]

    def bytes_of(self, blocks: float) -> float:
        return blocks * self.block_size_tokens * self.bytes_per_token

    def blocks_of(self, amount_bytes: float) -> int:
        return int(amount_bytes / (self.block_size_tokens * self.bytes_per_token))


class Wanted(Struct, frozen=True, kw_only=True):
    """What to look at. `capacities_gb` empty: sizes from a hundredth to all that is useful."""

    bytes_per_token: float
    capacities_gb: tuple[float, ...] = ()
    tiers_gb: tuple[tuple[str, float], ...] = ()
    sample_rate: float = 1.0
    bytes_per_s: float = 1.25e9  # of the link that a chunk would come over
    latency_s: float = 0.001
    prices: Prices | None = None
    seed: int = 0


def size_trace(trace: Trace, wanted: Wanted) -> Sizing:
    cached = prefix_trace(trace)
    if wanted.sample_rate < 1:
        curve = sampled_curve(cached, rate=wanted.sample_rate, seed=wanted.seed)
    else:
        curve = exact_curve(cached)
    block_bytes = trace.block_size_tokens * wanted.bytes_per_token
    capacities = _capacities(curve, wanted, block_bytes)
    steps = table(curve, capacities, bytes_per_token=wanted.bytes_per_token)
    bend = knee(curve)
    tiers = tuple((name, max(1, int(gb * 1e9 / block_bytes))) for name, gb in wanted.tiers_gb)
    total_blocks = sum(blocks for _, blocks in tiers) or (bend.capacity_blocks if bend is not None else 0)
    chunks, skipped = _chunks(trace, wanted, room_bytes=total_blocks * block_bytes)
    span_s = _span_s(cached)
    rows = (
        []
        if wanted.prices is None
        else [cost_row(step.capacity_bytes, step.hit_tokens, span_s=span_s, prices=wanted.prices) for step in steps]
    )
    return Sizing(
        block_size_tokens=trace.block_size_tokens,
        bytes_per_token=wanted.bytes_per_token,
        requests=len(cached.requests),
        input_tokens=cached.input_tokens,
        distinct_blocks=cached.distinct_blocks,
        span_s=span_s,
        curve=curve,
        sample_rate=wanted.sample_rate,
        knee=bend,
        steps=steps,
        histogram=reuse_histogram(curve),
        tiers=tier_hits(curve, tiers) if tiers else (),
        splits=_splits(curve, total_blocks, block_bytes),
        chunks=chunks,
        skipped_chunks=skipped,
        costs=tuple(row for row in rows if row is not None),
    )


def _capacities(curve: HitCurve, wanted: Wanted, block_bytes: float) -> tuple[int, ...]:
    if wanted.capacities_gb:
        return tuple(max(1, int(gb * 1e9 / block_bytes)) for gb in wanted.capacities_gb)
    largest = max(curve.largest_useful_blocks, 1)
    smallest = max(1, largest // 100)
    return tuple(dict.fromkeys(int(blocks) for blocks in np.geomspace(smallest, largest, 12)))


def _splits(curve: HitCurve, total_blocks: int, block_bytes: float) -> tuple[SplitRow, ...]:
    rows = []
    for share in NEAR_SHARES if total_blocks else ():
        near = max(1, round(total_blocks * share))
        far = total_blocks - near
        parts = tier_hits(curve, (("near", near), ("far", far)))
        rows.append(
            SplitRow(
                near * block_bytes,
                far * block_bytes,
                parts[0].hit_tokens + parts[1].hit_tokens,
                parts[1].share_of_hits,
                near * block_bytes + total_blocks * METADATA_BYTES_PER_OBJECT,
            )
        )
    return tuple(rows)


def _chunks(trace: Trace, wanted: Wanted, *, room_bytes: float) -> tuple[tuple[ChunkRow, ...], tuple[str, ...]]:
    """The same room for every size. Sizes that do not fit the trace's blocks, or would take minutes, are named."""
    listed = prefix_trace(trace, partial_tail=True)
    blocks, starts = flattened(listed)
    input_tokens = np.fromiter((r.input_tokens for r in listed.requests), dtype=np.int64, count=len(listed.requests))
    rows, skipped = [], []
    for chunk_tokens in CHUNK_TOKENS:
        if not fits(chunk_tokens, trace.block_size_tokens):
            skipped.append(f"{chunk_tokens}: no whole number of the trace's blocks of {trace.block_size_tokens} tokens")
            continue
        uses = int((input_tokens // chunk_tokens).sum())
        if uses > MOST_CHUNK_USES:
            skipped.append(f"{chunk_tokens}: {uses:,} chunk uses, more than {MOST_CHUNK_USES:,}; cut the trace first")
            continue
        rows.append(_chunk_row(chunk_tokens, blocks, starts, input_tokens, trace, wanted, room_bytes))
    return tuple(rows), tuple(skipped)


def _chunk_row(
    chunk_tokens: int,
    blocks: np.ndarray,
    starts: np.ndarray,
    input_tokens: np.ndarray,
    trace: Trace,
    wanted: Wanted,
    room_bytes: float,
) -> ChunkRow:
    chunked = rechunk(blocks, starts, input_tokens, block_tokens=trace.block_size_tokens, chunk_tokens=chunk_tokens)
    distances = stack_distances(chunked.chunks, chunked.starts, chunked.distinct)
    total = int(input_tokens.sum())
    curve = make_curve(
        distances,
        np.full(len(distances), chunk_tokens, dtype=np.int64),
        block_size_tokens=chunk_tokens,
        input_tokens=total,
        distinct_blocks=chunked.distinct,
    )
    chunk_bytes = chunk_tokens * wanted.bytes_per_token
    objects = min(int(room_bytes / chunk_bytes), chunked.distinct)
    hits = curve.hits_at(room_bytes / chunk_bytes)
    return ChunkRow(
        chunk_tokens,
        hits,
        hits / total if total else 0.0,
        objects,
        objects * METADATA_BYTES_PER_OBJECT,
        transfer_efficiency(chunk_bytes, bytes_per_s=wanted.bytes_per_s, latency_s=wanted.latency_s),
    )


def _span_s(trace: PrefixTrace) -> float:
    return trace.requests[-1].at_s - trace.requests[0].at_s if trace.requests else 0.0
