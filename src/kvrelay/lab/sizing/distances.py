"""Stack distances of a whole trace: compiled where the `sim` extra (numba) is installed, in plain Python otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kvrelay.core.cachesim.prefix_trace import PrefixTrace
from kvrelay.core.model.arrays import Ints
from kvrelay.core.sizing.curve import HitCurve, make_curve
from kvrelay.core.sizing.shards import adjustment_tokens, sampled
from kvrelay.core.sizing.stack_distance import distances_into, tree_size

SLOW_FROM_BLOCKS = 500_000  # block uses from which plain Python takes several seconds


def compiled() -> bool:
    """Whether numba is there."""
    return importlib.util.find_spec("numba") is not None


def slow_note(blocks: int) -> str | None:
    """What to tell somebody who waits, if it is going to take long."""
    if compiled() or blocks < SLOW_FROM_BLOCKS:
        return None
    return (
        f"{blocks:,} block uses in plain Python take about {blocks / 2e5:,.0f} s; "
        "`pip install 'kvrelay[sim]'` compiles this part, `--sample 0.1` looks at a tenth"
    )


def flattened(trace: PrefixTrace) -> tuple[Ints, Ints]:
    """All blocks one after the other, and where each request's begin (one entry more than requests)."""
    lengths = np.fromiter((len(r.blocks) for r in trace.requests), dtype=np.int64, count=len(trace.requests))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    blocks = np.fromiter((b for r in trace.requests for b in r.blocks), dtype=np.int64, count=int(starts[-1]))
    return blocks, starts


def stack_distances(blocks: Ints, starts: Ints, distinct: int) -> Ints:
    """One distance per entry of `blocks`, whose numbers are below `distinct`; 0 for a first use."""
    longest = int(np.diff(starts).max(initial=0))
    size = tree_size(distinct, longest) + 1
    if compiled():
        out = np.zeros(len(blocks), dtype=np.int64)
        _fast()(
            blocks.astype(np.int64),
            starts,
            out,
            np.zeros(distinct, np.int32),
            np.zeros(size, np.int32),
            np.zeros(size, np.int32),
        )
        return out
    found = [0] * len(blocks)
    distances_into(blocks.tolist(), starts.tolist(), found, [0] * distinct, [0] * size, [0] * size)
    return np.array(found, dtype=np.int64)


def exact_curve(trace: PrefixTrace) -> HitCurve:
    """Every capacity at once."""
    blocks, starts = flattened(trace)
    return make_curve(
        stack_distances(blocks, starts, trace.distinct_blocks),
        _tokens(trace, starts),
        block_size_tokens=trace.block_size_tokens,
        input_tokens=trace.input_tokens,
        distinct_blocks=trace.distinct_blocks,
    )


def sampled_curve(trace: PrefixTrace, *, rate: float, seed: int = 0) -> HitCurve:
    """The same from a sample of the blocks; see `core/sizing/shards.py`."""
    blocks, starts = flattened(trace)
    tokens = _tokens(trace, starts)
    kept = sampled(blocks, rate=rate, seed=seed)
    numbers = np.unique(blocks[kept], return_inverse=True)[1].astype(np.int64)
    kept_before = np.concatenate([[0], np.cumsum(kept)])
    distinct = int(numbers.max(initial=-1)) + 1
    distances = stack_distances(numbers, kept_before[starts].astype(np.int64), distinct)
    return make_curve(
        distances,
        tokens[kept],
        block_size_tokens=trace.block_size_tokens,
        input_tokens=trace.input_tokens,
        distinct_blocks=trace.distinct_blocks,
        scale=1 / rate,
        adjustment_tokens=adjustment_tokens(float(tokens.sum()), float(tokens[kept].sum()), rate=rate),
    )


def _tokens(trace: PrefixTrace, starts: Ints) -> Ints:
    """Tokens in each listed block: the block size, less in a partial last one."""
    size = trace.block_size_tokens
    tokens = np.full(int(starts[-1]), size, dtype=np.int64)
    for request, end in zip(trace.requests, starts[1:].tolist(), strict=True):
        if request.blocks:
            tokens[end - 1] = min(size, request.input_tokens - size * (len(request.blocks) - 1))
    return tokens


@cache
def _fast() -> Callable[..., Any]:
    import numba

    return numba.njit(cache=True, nogil=True)(distances_into)
