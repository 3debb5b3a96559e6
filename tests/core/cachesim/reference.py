"""Rows of the reference values, and our figures for the same question."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.core.cachesim.eviction.fifo import Fifo
from kvrelay.core.cachesim.eviction.lru import Lru
from kvrelay.core.cachesim.eviction.ttl import Ttl
from kvrelay.core.cachesim.misses import Miss
from kvrelay.core.cachesim.prefix import PrefixResult, run_prefix_caches
from kvrelay.core.cachesim.prefix_trace import PrefixTrace, prefix_trace
from kvrelay.core.cachesim.routers import ROUTERS
from kvrelay.lab.replay.trace_file import read_trace

TRACES = Path(__file__).parents[4] / "shared" / "traces"
UNBOUNDED = 1 << 40

_EVICTION = {
    "none": lambda capacity, on_gone: Lru(UNBOUNDED, on_gone),
    "lru_tail_first": Lru,
    "lru_head_first": lambda capacity, on_gone: Lru(capacity, on_gone, head_first=True),
    "fifo": Fifo,
}


@cache
def rows() -> dict[str, list[dict[str, Any]]]:
    """Nothing where the traces are not at hand."""
    if not (TRACES / "reference_values.json").exists():
        return {"capacity": [], "ttl": []}
    return msgspec.json.decode((TRACES / "reference_values.json").read_bytes())


@cache
def reference_trace(name: str) -> PrefixTrace:
    """With the partial last block, as the rows were made."""
    return prefix_trace(read_trace(TRACES / name).trace, partial_tail=True)


def capacity_figures(row: dict[str, Any]) -> dict[str, Any]:
    """Ours, under the names of the row."""
    trace, workers, capacity = reference_trace(row["file"]), row["workers"], row["capacity_blocks_per_worker"]
    router = ROUTERS[row["router"]](workers) if workers > 1 else None
    made = _EVICTION[row["eviction"]]
    result = run_prefix_caches(trace, lambda on_gone: made(capacity, on_gone), router, workers=workers)
    computed = [share.computed_tokens for share in result.workers]
    requests = [share.requests for share in result.workers]
    return {
        **_hits(result),
        "requests": result.requests,
        "blocks": result.blocks,
        "tokens": result.input_tokens,
        "hit_tokens": result.hit.tokens,
        "token_hit": round(result.token_hit_ratio, 6),
        "miss_held_by_a_better_worker_blocks": result.misses[Miss.OTHER_WORKER].blocks,
        "max_over_mean_prefill_tokens": round(max(computed) * workers / sum(computed), 3),
        "max_over_mean_requests": round(max(requests) * workers / sum(requests), 3),
        "token_hit_second_half": round(result.hit_second_half.tokens / result.input_tokens_second_half, 6),
    }


def ttl_figures(row: dict[str, Any]) -> dict[str, Any]:
    capacity, ttl_s = row["capacity_blocks"], row["ttl_s"]
    result = run_prefix_caches(
        reference_trace(row["file"]),
        lambda on_gone: Lru(capacity, on_gone) if ttl_s is None else Ttl(capacity, on_gone, ttl_s=ttl_s),
    )
    assert ttl_s is not None or result.expired_blocks == 0
    return _hits(result)


def _hits(result: PrefixResult) -> dict[str, Any]:
    lost = (Miss.OTHER_WORKER, Miss.CAPACITY, Miss.EXPIRED, Miss.INVALIDATED)
    return {
        "hit_blocks": result.hit.blocks,
        "block_hit": round(result.hit.blocks / result.blocks, 6),
        "miss_never_seen_blocks": result.misses[Miss.COLD].blocks + result.misses[Miss.NEW_SUFFIX].blocks,
        "miss_seen_before_blocks": sum(result.misses[kind].blocks for kind in lost),
    }


def agreeing(figures: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The row cut to what we computed, to be compared with it."""
    return {name: row[name] for name in figures}
