"""The canonical table of metrics: one row per name, from which everything else that names a metric is made.

The page's HELP texts, the dashboard, the alert rules, the rules for merging several processes and the guide's table all
come from here. `source` says where a number comes from. Where it is a worker's page (`page:NAME`, a canonical name of
`edge/connectors/metrics_page.py`), engines that do not have it leave the series absent, which is not zero, and
`kvrelay_source_available` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from msgspec import Struct

Kind = Literal["counter", "gauge", "histogram"]
Merge = Literal["sum", "max", "min"]


class Row(StrEnum):
    """The five rows of the dashboard, in its order, and what has no panel there."""

    WAITING = "User waiting"
    CACHE = "Cache effect"
    LOAD = "Routing load"
    TRANSFER = "Transfer reliability"
    TASK = "Task result"
    UPKEEP = "Upkeep"


DASHBOARD_ROWS = (Row.WAITING, Row.CACHE, Row.LOAD, Row.TRANSFER, Row.TASK)


class MetricSpec(Struct, frozen=True, kw_only=True):
    """`merge`: of several processes of one gateway. "sum": each has its own part; "max": all look at the same thing,
    and some are behind; "min": it holds only if it holds for all. Counters and histograms always add up."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    row: Row = Row.UPKEEP
    source: str = "receipts"
    merge: Merge = "sum"


_W = ("worker",)


def _counter(
    name: str, unit: str, meaning: str, row: Row = Row.UPKEEP, labels: tuple[str, ...] = (), source: str = "receipts"
) -> MetricSpec:
    return MetricSpec(name=name, kind="counter", unit=unit, meaning=meaning, row=row, labels=labels, source=source)


def _gauge(
    name: str,
    unit: str,
    meaning: str,
    row: Row = Row.UPKEEP,
    labels: tuple[str, ...] = (),
    source: str = "router",
    merge: Merge = "max",
) -> MetricSpec:
    return MetricSpec(
        name=name, kind="gauge", unit=unit, meaning=meaning, row=row, labels=labels, source=source, merge=merge
    )


def _histogram(name: str, meaning: str, row: Row, labels: tuple[str, ...] = (), source: str = "receipts") -> MetricSpec:
    return MetricSpec(
        name=name, kind="histogram", unit="seconds", meaning=meaning, row=row, labels=labels, source=source
    )


_ALL = (
    # --- user waiting
    _histogram("kvrelay_ttft_seconds", "Arrival to first token.", Row.WAITING),
    _histogram("kvrelay_itl_seconds", "Gaps between output chunks.", Row.WAITING),
    _histogram("kvrelay_e2e_seconds", "Arrival to end.", Row.WAITING),
    _histogram(
        "kvrelay_session_wall_seconds",
        "First arrival to last end of a session, once nothing of it came for observe.task_idle_s.",
        Row.WAITING,
    ),
    # --- cache effect
    _counter("kvrelay_eligible_tokens_total", "tokens", "Prompt tokens that could have been cached.", Row.CACHE),
    _counter("kvrelay_prompt_tokens_total", "tokens", "Tokens of prompts, as counted.", Row.CACHE),
    _counter("kvrelay_completion_tokens_total", "tokens", "Tokens of answers, as counted.", Row.LOAD),
    _counter(
        "kvrelay_claimed_tokens_total",
        "tokens",
        "Cached tokens believed at routing time.",
        Row.CACHE,
        ("worker", "tier"),
    ),
    _counter(
        "kvrelay_actual_cached_tokens_total",
        "tokens",
        "Cached tokens reported by the engine.",
        Row.CACHE,
        ("worker", "tier"),
        "usage of the answers",
    ),
    _counter(
        "kvrelay_recomputed_tokens_total",
        "tokens",
        "Eligible tokens that were computed again; the sum of all gates.",
        Row.CACHE,
        source="receipts, usage of the answers",
    ),
    _counter(
        "kvrelay_unaccounted_eligible_tokens_total",
        "tokens",
        "Eligible tokens of requests whose hits are not known: neither hit nor recomputed.",
        Row.CACHE,
    ),
    _counter("kvrelay_gate_loss_tokens_total", "tokens", "Eligible tokens lost, by gate.", Row.CACHE, ("gate",)),
    _counter(
        "kvrelay_stale_claim_tokens_total",
        "tokens",
        "Tokens claimed at routing time beyond what the engine then hit.",
        Row.CACHE,
        _W,
    ),
    _gauge(
        "kvrelay_reported_cached_tokens",
        "tokens",
        "Cached tokens by the worker's own count since its start, where it tells tiers apart.",
        Row.CACHE,
        ("worker", "tier"),
        "page:hits_by_tier_tokens",
    ),
    _gauge(
        "kvrelay_reported_prefix_queries_tokens",
        "tokens",
        "Prompt tokens looked up in the prefix cache, by the worker's own count since its start.",
        Row.CACHE,
        _W,
        "page:prefix_queries_tokens",
    ),
    _gauge(
        "kvrelay_reported_prefix_hits_tokens",
        "tokens",
        "Prompt tokens found in the prefix cache, by the worker's own count since its start.",
        Row.CACHE,
        _W,
        "page:prefix_hits_tokens",
    ),
    _gauge(
        "kvrelay_reported_kv_usage_ratio",
        "ratio",
        "Share of KV blocks in use, according to the worker.",
        Row.CACHE,
        _W,
        "page:kv_usage_ratio",
    ),
    _gauge("kvrelay_index_blocks", "blocks", "Blocks believed to be there.", Row.CACHE, ("worker", "tier")),
    _counter(
        "kvrelay_events_total",
        "events",
        "KV events received; of removals, the blocks.",
        Row.CACHE,
        ("worker", "kind"),
        "KV events",
    ),
    _histogram(
        "kvrelay_ttft_by_cache_seconds",
        "Arrival to first token, by whether at least half of the prompt was hit, and by its length in tokens.",
        Row.CACHE,
        ("cache", "prompt"),
    ),
    # --- routing load
    _counter(
        "kvrelay_requests_total",
        "requests",
        "Client requests by their one terminal status.",
        Row.LOAD,
        ("worker", "policy", "status"),
    ),
    _counter("kvrelay_routed_total", "requests", "Requests by why their worker was chosen.", Row.LOAD, ("reason",)),
    _gauge(
        "kvrelay_active_requests",
        "requests",
        "Requests that we sent to the worker and that have not ended.",
        Row.LOAD,
        _W,
        merge="sum",
    ),
    _gauge(
        "kvrelay_active_prefill_tokens",
        "tokens",
        "Prompt tokens booked there and not yet computed.",
        Row.LOAD,
        _W,
        merge="sum",
    ),
    _gauge(
        "kvrelay_active_decode_blocks",
        "blocks",
        "KV blocks of running generations, as booked.",
        Row.LOAD,
        _W,
        merge="sum",
    ),
    _gauge(
        "kvrelay_reported_running_requests",
        "requests",
        "Running requests according to the worker.",
        Row.LOAD,
        _W,
        "page:running_requests",
    ),
    _gauge(
        "kvrelay_reported_waiting_requests",
        "requests",
        "Waiting requests according to the worker.",
        Row.LOAD,
        _W,
        "page:waiting_requests",
    ),
    _gauge("kvrelay_queue_depth", "requests", "Requests that wait for a free worker.", Row.LOAD, merge="sum"),
    _histogram("kvrelay_decision_seconds", "Routing decision, hashing apart.", Row.LOAD, source="router"),
    _counter(
        "kvrelay_spills_total",
        "requests",
        "Requests sent away from the best cache or their session's worker: too busy.",
        Row.LOAD,
    ),
    _counter(
        "kvrelay_deadlines_total",
        "requests",
        "Requests with a deadline for their first token, by what came of it.",
        Row.LOAD,
        ("outcome",),
    ),
    _counter(
        "kvrelay_unscored_total",
        "requests",
        "Requests routed without matching their prompt.",
        Row.UPKEEP,
        ("path", "because"),
    ),
    # --- transfer reliability
    _counter(
        "kvrelay_fallbacks_total",
        "requests",
        "Requests that were not handled by their first choice, and why.",
        Row.TRANSFER,
        ("reason",),
    ),
    _counter(
        "kvrelay_attempts_failed_total",
        "attempts",
        "Attempts that ended badly, retried or not.",
        Row.TRANSFER,
        ("worker", "fault"),
    ),
    _counter(
        "kvrelay_remote_bytes_read_total",
        "bytes",
        "Bytes loaded from shared tiers for requests, by their receipts.",
        Row.TRANSFER,
    ),
    _counter(
        "kvrelay_store_ops_total",
        "operations",
        "Operations on a tier of the store, by what came of them.",
        Row.TRANSFER,
        ("tier", "op", "outcome"),
        "store",
    ),
    _counter(
        "kvrelay_store_bytes_total",
        "bytes",
        "Bytes moved to and from a tier of the store.",
        Row.TRANSFER,
        ("tier", "direction"),
        "store",
    ),
    _histogram(
        "kvrelay_store_seconds", "Time of operations on a tier of the store.", Row.TRANSFER, ("tier", "op"), "store"
    ),
    _gauge(
        "kvrelay_store_in_use",
        "boolean",
        "1 while a tier of the store is asked, 0 while it is out of use.",
        Row.TRANSFER,
        ("tier",),
        "store",
        "min",
    ),
    _gauge("kvrelay_store_used_bytes", "bytes", "Bytes that a tier holds.", Row.TRANSFER, ("tier",), "store"),
    _gauge("kvrelay_store_capacity_bytes", "bytes", "Bytes that a tier may hold.", Row.TRANSFER, ("tier",), "store"),
    _counter(
        "kvrelay_store_phantoms_total",
        "objects",
        "Objects that a tier listed and then did not have.",
        Row.TRANSFER,
        (),
        "store",
    ),
    _counter(
        "kvrelay_store_unannounced_objects_total",
        "objects",
        "Objects that were found in a tier with an index, and that nobody had told of.",
        Row.TRANSFER,
        ("tier",),
        "store",
    ),
    # --- task result
    _counter("kvrelay_retries_total", "attempts", "Attempts after the first one of a request.", Row.TASK),
    _counter(
        "kvrelay_tasks_total",
        "tasks",
        "Ended sessions: ok if every request of it succeeded, failed if one did not.",
        Row.TASK,
        ("outcome",),
    ),
    _counter(
        "kvrelay_tasks_not_followed_total",
        "tasks",
        "Sessions beyond the bound of those that are followed at once; their outcome is not counted.",
        Row.UPKEEP,
    ),
    _gauge(
        "kvrelay_worker_gpus",
        "GPUs",
        "GPUs of the worker, as configured (workers.gpus), up or not, for both cost; else absent.",
        Row.TASK,
        _W,
        "configuration",
    ),
    _gauge(
        "kvrelay_gpu_hour_price",
        "currency",
        "Price of one GPU for one hour, as configured (observe.gpu_hour_price); absent where not configured.",
        Row.TASK,
        (),
        "configuration",
    ),
    # --- upkeep
    _gauge(
        "kvrelay_process_up",
        "boolean",
        "1 if this process takes requests.",
        Row.UPKEEP,
        ("process",),
        "group of processes",
    ),
    _counter(
        "kvrelay_process_restarts_total",
        "restarts",
        "Processes that had to be started again.",
        Row.UPKEEP,
        (),
        "group of processes",
    ),
    _gauge("kvrelay_worker_up", "boolean", "1 if the worker is healthy.", Row.UPKEEP, _W, merge="min"),
    _gauge(
        "kvrelay_worker_joined_timestamp_seconds",
        "seconds since the epoch",
        "When the present life of the worker was first seen.",
        Row.UPKEEP,
        _W,
        "fleet",
    ),
    _gauge(
        "kvrelay_source_available",
        "boolean",
        "1 if the worker's metrics page carries this number, 0 if it is unavailable: its series are absent then.",
        Row.UPKEEP,
        ("worker", "source"),
        "fleet",
    ),
    _gauge("kvrelay_index_usable", "boolean", "1 if prompts can be matched with it.", Row.UPKEEP, _W, merge="min"),
    _gauge("kvrelay_orphan_blocks", "blocks", "Announced blocks whose parent is unknown.", Row.UPKEEP, _W),
    _gauge("kvrelay_sessions", "sessions", "Session bindings.", Row.UPKEEP),
    _counter(
        "kvrelay_drifted_requests_total",
        "requests",
        "Requests whose claim differed from the actual hit by more than a block, and no event explains it.",
        Row.UPKEEP,
        ("worker", "kind"),
        "router",
    ),
    _counter(
        "kvrelay_migrations_total",
        "streams",
        "Streams that went on at this worker after another one was lost.",
        Row.UPKEEP,
        _W,
    ),
    _counter("kvrelay_event_gaps_total", "holes", "Holes seen in an event sequence.", Row.UPKEEP, _W, "router"),
    _counter(
        "kvrelay_index_resyncs_total",
        "resyncs",
        "Resyncs because claims and actual hits drifted apart.",
        Row.UPKEEP,
        _W,
        "router",
    ),
    _counter(
        "kvrelay_events_malformed_total",
        "messages",
        "Event messages that broke the format.",
        Row.UPKEEP,
        _W,
        "KV events",
    ),
    _counter(
        "kvrelay_events_unknown_topic_total",
        "messages",
        "Event messages on a shared socket that are no worker's.",
        Row.UPKEEP,
        ("endpoint",),
        "KV events",
    ),
    _counter(
        "kvrelay_unauthorized_total",
        "requests",
        "Requests without a valid API key; the only ones without a receipt.",
        Row.UPKEEP,
        (),
        "gateway",
    ),
    _counter("kvrelay_reports_total", "reports", "What the router reported, by kind.", Row.UPKEEP, ("kind",), "router"),
    _counter(
        "kvrelay_token_cache_hits_total",
        "pieces",
        "Pieces of prompts whose token ids were known.",
        Row.UPKEEP,
        (),
        "tokenizer",
    ),
    _counter(
        "kvrelay_token_cache_misses_total",
        "pieces",
        "Pieces of prompts that were tokenized.",
        Row.UPKEEP,
        (),
        "tokenizer",
    ),
)

METRICS: Mapping[str, MetricSpec] = {spec.name: spec for spec in _ALL}
assert len(METRICS) == len(_ALL), "every name once"


def of_row(row: Row) -> tuple[MetricSpec, ...]:
    return tuple(spec for spec in _ALL if spec.row is row)
