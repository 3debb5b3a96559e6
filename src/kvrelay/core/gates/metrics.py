"""Every figure that a gate may judge, its unit (last word of the name) and which way is better."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Better(StrEnum):
    LOWER = "lower"
    HIGHER = "higher"


class Kind(StrEnum):
    """`modelled` times of mock workers are latencies, too, and are judged as such but never called performance."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    RELIABILITY = "reliability"
    REUSE = "reuse"
    MEMORY = "memory"
    BALANCE = "balance"


class Metric(Struct, frozen=True):
    better: Better
    kind: Kind
    meaning: str


_L, _H = Better.LOWER, Better.HIGHER

METRICS: dict[str, Metric] = {
    "ttft_p50_ms": Metric(_L, Kind.LATENCY, "median time from due to first token; a failed request never got one"),
    "ttft_p95_ms": Metric(_L, Kind.LATENCY, "p95 of the time from due to first token; a failed request never got one"),
    "ttft_p99_ms": Metric(_L, Kind.LATENCY, "p99 of the time from due to first token; a failed request never got one"),
    "itl_p95_ms": Metric(_L, Kind.LATENCY, "p95 of the time between two tokens of answers that came to their end"),
    "session_wall_p50_ms": Metric(_L, Kind.LATENCY, "median from first turn due to last turn ended; failed: never"),
    "session_wall_p95_ms": Metric(_L, Kind.LATENCY, "p95 from first turn due to last turn ended; failed: never"),
    "successful_tasks_per_s": Metric(_H, Kind.THROUGHPUT, "sessions all of whose turns were answered, per second"),
    "task_success_ratio": Metric(_H, Kind.RELIABILITY, "sessions all of whose turns were answered / sessions planned"),
    "failed_requests": Metric(_L, Kind.RELIABILITY, "planned requests that were not answered to their end"),
    "failed_ratio": Metric(_L, Kind.RELIABILITY, "failed requests / planned requests"),
    "retries_ratio": Metric(_L, Kind.RELIABILITY, "attempts beyond the first / planned requests"),
    "hit_ratio": Metric(_H, Kind.REUSE, "prompt tokens that engines reported as cached / eligible tokens"),
    "engine_hit_ratio": Metric(_H, Kind.REUSE, "cached / queried tokens in the engines' own counters over the arm"),
    "hits_disagree_ratio": Metric(_L, Kind.REUSE, "|engines' counters - sum over requests| / the larger of the two"),
    "claim_error_ratio": Metric(_L, Kind.REUSE, "sum of |claimed - actual| tokens / eligible tokens"),
    "recomputed_tokens": Metric(_L, Kind.REUSE, "tokens computed although an earlier prompt of the arm had them"),
    "wrong_context_requests": Metric(_L, Kind.REUSE, "answers that differ from those of the baseline arm"),
    "kv_usage_peak_ratio": Metric(_L, Kind.MEMORY, "highest share of KV blocks in use that was seen on a worker"),
    "preemptions": Metric(_L, Kind.MEMORY, "requests that lost their blocks and were computed again"),
    "max_over_mean_load_ratio": Metric(_L, Kind.BALANCE, "requests in flight at the busiest worker / mean of all"),
}

PAIRED_METRICS: dict[str, str] = {
    "ttft_ms": "time from due to first token of the same turn in the same repeat",
    "session_wall_ms": "time from first turn due to last turn ended of the same session in the same repeat",
    "failures": "failed requests in the same bucket",
}

FINAL_JUDGES = ("ttft_p95_ms", "session_wall_p50_ms", "successful_tasks_per_s")
"""What decides in the end, whatever else a gate file asks for; they stand in every verdict."""
