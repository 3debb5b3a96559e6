"""What the dashboard shows: panels of the five rows, each a few questions to Prometheus.

Waiting is shown as p50, p95 and p99, never as a mean, and only where at least `MIN_SAMPLES` values stand behind it;
below that the panel says `insufficient_samples` with their count.
"""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.doctor.window_rules import MIN_ELIGIBLE_TOKENS, MIN_SAMPLES
from kvrelay.edge.observe.metric_table import METRICS, Row
from kvrelay.edge.observe.promql import RATE, hit_ratio, increase, judged_tokens, level, observed, quantile, rate

WORKER = 'worker=~"$worker"'
RANGE = "$__range"
QUANTILES = (0.5, 0.95, 0.99)


class Query(Struct, frozen=True):
    """`legend` in Grafana's notation."""

    expression: str
    legend: str


class Panel(Struct, frozen=True, kw_only=True):
    """`unit` is one of Grafana's. `shape`: a line over time, or the last value as a number."""

    row: Row
    title: str
    unit: str
    queries: tuple[Query, ...]
    shape: str = "timeseries"
    metrics: tuple[str, ...]  # rows of the table that it shows; its help text is theirs
    stacked: bool = False


def _waiting(name: str, title: str, row: Row = Row.WAITING) -> Panel:
    enough = f"{observed(name)} >= {MIN_SAMPLES}"
    queries = [Query(f"{quantile(name, q)} and on () ({enough})", f"p{q * 100:g}") for q in QUANTILES]
    too_few = f"{observed(name)} < {MIN_SAMPLES}"
    queries.append(Query(too_few, "insufficient_samples: values in the window"))
    return Panel(row=row, title=title, unit="s", queries=tuple(queries), metrics=(name,))


def _rates(row: Row, title: str, unit: str, name: str, *by: str) -> Panel:
    where = WORKER if "worker" in METRICS[name].labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in by) or title
    return Panel(
        row=row,
        title=title,
        unit=unit,
        queries=(Query(rate(name, by=by, where=where), legend),),
        metrics=(name,),
    )


def _levels(row: Row, title: str, unit: str, *names: str, by: tuple[str, ...] = ("worker",)) -> Panel:
    queries = []
    for name in names:
        where = WORKER if "worker" in METRICS[name].labels else ""
        labels = " ".join(f"{{{{{label}}}}}" for label in by)
        what = "" if len(names) == 1 else name.removeprefix("kvrelay_").replace("_", " ")
        queries.append(Query(level(name, by=by, where=where), f"{labels} {what}".strip()))
    return Panel(row=row, title=title, unit=unit, queries=tuple(queries), metrics=names)


def _cache_panels() -> tuple[Panel, ...]:
    tokens = ("eligible", "claimed", "actual_cached", "recomputed", "unaccounted_eligible")
    names = tuple(f"kvrelay_{one}_tokens_total" for one in tokens)
    reported_hits = "sum(rate(kvrelay_reported_prefix_hits_tokens[5m]))"
    reported_queries = "sum(rate(kvrelay_reported_prefix_queries_tokens[5m]))"
    by_tier = f"rate(kvrelay_reported_cached_tokens{{{WORKER}}}[5m])"
    both = ("cache", "prompt")
    median = quantile("kvrelay_ttft_by_cache_seconds", 0.5, by=both)
    enough = f"{observed('kvrelay_ttft_by_cache_seconds', by=both)} >= {MIN_SAMPLES}"
    return (
        Panel(
            row=Row.CACHE,
            title="Hit ratio",
            unit="percentunit",
            queries=(
                Query(f"{hit_ratio()} and on () ({judged_tokens()} >= {MIN_ELIGIBLE_TOKENS})", "of what could be hit"),
                Query(f"{reported_hits} / {reported_queries}", "of all prompts, by the workers' own counts"),
                Query(f"{judged_tokens()} < {MIN_ELIGIBLE_TOKENS}", "insufficient_samples: tokens in the window"),
            ),
            metrics=(
                "kvrelay_actual_cached_tokens_total",
                "kvrelay_reported_prefix_hits_tokens",
                "kvrelay_reported_prefix_queries_tokens",
            ),
        ),
        Panel(
            row=Row.CACHE,
            title="Tokens: could be hit, claimed, hit, recomputed",
            unit="short",
            queries=tuple(Query(rate(name), one.replace("_", " ")) for name, one in zip(names, tokens, strict=True)),
            metrics=names,
        ),
        Panel(
            row=Row.CACHE,
            title="Lost tokens by gate",
            unit="short",
            queries=(Query(rate("kvrelay_gate_loss_tokens_total", by=("gate",)), "{{gate}}"),),
            metrics=("kvrelay_gate_loss_tokens_total",),
            stacked=True,
        ),
        Panel(
            row=Row.CACHE,
            title="Time to first token with and without a hit",
            unit="s",
            queries=(Query(f"{median} and on (cache, prompt) ({enough})", "p50 {{cache}} {{prompt}}"),),
            metrics=("kvrelay_ttft_by_cache_seconds",),
        ),
        _rates(Row.CACHE, "Claimed and then not hit", "short", "kvrelay_stale_claim_tokens_total", "worker"),
        Panel(
            row=Row.CACHE,
            title="Hits by tier, by the workers' own counts",
            unit="short",
            queries=(Query(f"sum by (worker, tier) ({by_tier})", "{{worker}} {{tier}}"),),
            metrics=("kvrelay_reported_cached_tokens",),
        ),
        _levels(Row.CACHE, "KV usage", "percentunit", "kvrelay_reported_kv_usage_ratio"),
        _levels(Row.CACHE, "Blocks in the index", "short", "kvrelay_index_blocks", by=("worker", "tier")),
        _rates(Row.CACHE, "KV events, evictions among them", "short", "kvrelay_events_total", "worker", "kind"),
        Panel(
            row=Row.CACHE,
            title="Prompt tokens",
            unit="short",
            queries=(Query(rate("kvrelay_prompt_tokens_total"), "prompt tokens per second"),),
            metrics=("kvrelay_prompt_tokens_total",),
        ),
    )


def _task_panels() -> tuple[Panel, ...]:
    ended = increase("kvrelay_tasks_total", window=RANGE)
    succeeded = increase("kvrelay_tasks_total", where='outcome="ok"', window=RANGE)
    gpu_seconds = f"sum(avg_over_time(kvrelay_worker_gpus[{RANGE}])) * $__range_s"
    price = "scalar(max(kvrelay_gpu_hour_price))"
    requests = increase("kvrelay_requests_total", window=RANGE)
    not_ok = increase("kvrelay_requests_total", by=("status",), where='status!="ok"', window=RANGE)
    return (
        Panel(
            row=Row.TASK,
            title="Whole tasks that succeeded",
            unit="percentunit",
            queries=(Query(f"{succeeded} / {ended}", "of all that ended, failed ones included"),),
            shape="stat",
            metrics=("kvrelay_tasks_total",),
        ),
        Panel(
            row=Row.TASK,
            title="Tasks by outcome",
            unit="short",
            queries=(Query(increase("kvrelay_tasks_total", by=("outcome",), window=RANGE), "{{outcome}}"),),
            shape="stat",
            metrics=("kvrelay_tasks_total",),
        ),
        Panel(
            row=Row.TASK,
            title="GPU-seconds per successful task",
            unit="s",
            queries=(Query(f"{gpu_seconds} / {succeeded}", "all GPUs of the fleet, busy or not"),),
            shape="stat",
            metrics=("kvrelay_worker_gpus", "kvrelay_tasks_total"),
        ),
        Panel(
            row=Row.TASK,
            title="Cost per successful task",
            unit="short",
            queries=(Query(f"{gpu_seconds} / {succeeded} * {price} / 3600", "in the price's currency"),),
            shape="stat",
            metrics=("kvrelay_gpu_hour_price",),
        ),
        Panel(
            row=Row.TASK,
            title="Requests by status",
            unit="reqps",
            queries=(Query(rate("kvrelay_requests_total", by=("status",)), "{{status}}"),),
            metrics=("kvrelay_requests_total",),
            stacked=True,
        ),
        Panel(
            row=Row.TASK,
            title="Requests that did not end well",
            unit="percentunit",
            queries=(Query(f"{not_ok} / on () group_left () {requests}", "{{status}}"),),
            shape="stat",
            metrics=("kvrelay_requests_total",),
        ),
        _rates(Row.TASK, "Retries", "short", "kvrelay_retries_total"),
    )


TIER_OP = ("tier", "op")
PANELS: tuple[Panel, ...] = (
    _waiting("kvrelay_ttft_seconds", "Time to first token"),
    _waiting("kvrelay_itl_seconds", "Gaps between output chunks"),
    _waiting("kvrelay_e2e_seconds", "Whole answer"),
    _waiting("kvrelay_session_wall_seconds", "Whole session"),
    *_cache_panels(),
    _rates(Row.LOAD, "Requests by worker", "reqps", "kvrelay_requests_total", "worker"),
    _rates(Row.LOAD, "Why that worker", "reqps", "kvrelay_routed_total", "reason"),
    _levels(Row.LOAD, "Active requests, as booked", "short", "kvrelay_active_requests"),
    _levels(
        Row.LOAD,
        "Running and waiting, as workers say",
        "short",
        "kvrelay_reported_running_requests",
        "kvrelay_reported_waiting_requests",
    ),
    _levels(Row.LOAD, "Active prefill tokens", "short", "kvrelay_active_prefill_tokens"),
    _levels(Row.LOAD, "Active decode blocks", "short", "kvrelay_active_decode_blocks"),
    _levels(Row.LOAD, "Requests waiting in the gateway", "short", "kvrelay_queue_depth", by=()),
    _waiting("kvrelay_decision_seconds", "Routing decision", Row.LOAD),
    _rates(Row.LOAD, "Spills", "reqps", "kvrelay_spills_total"),
    _rates(Row.LOAD, "Deadlines by outcome", "reqps", "kvrelay_deadlines_total", "outcome"),
    _rates(Row.LOAD, "Output tokens", "short", "kvrelay_completion_tokens_total"),
    _rates(Row.TRANSFER, "Bytes moved", "Bps", "kvrelay_store_bytes_total", "tier", "direction"),
    Panel(
        row=Row.TRANSFER,
        title="Fetch and store latency",
        unit="s",
        queries=tuple(
            Query(quantile("kvrelay_store_seconds", q, by=("tier", "op")), f"p{q * 100:g} {{{{tier}}}} {{{{op}}}}")
            for q in QUANTILES
        ),
        metrics=("kvrelay_store_seconds",),
    ),
    _rates(Row.TRANSFER, "Operations by outcome", "ops", "kvrelay_store_ops_total", "tier", "op", "outcome"),
    Panel(
        row=Row.TRANSFER,
        title="Tiers out of use",
        unit="short",
        queries=(
            Query("1 - min by (tier) (kvrelay_store_in_use)", "{{tier}} out of use"),
            Query(rate("kvrelay_store_phantoms_total"), "listed and not there, per second"),
            Query(rate("kvrelay_store_unannounced_objects_total"), "there and not told of, per second"),
        ),
        metrics=("kvrelay_store_in_use", "kvrelay_store_phantoms_total", "kvrelay_store_unannounced_objects_total"),
    ),
    Panel(
        row=Row.TRANSFER,
        title="Bytes held and allowed",
        unit="bytes",
        queries=tuple(
            Query(level(f"kvrelay_store_{what}_bytes", by=("tier",)), f"{{{{tier}}}} {what}")
            for what in ("used", "capacity")
        ),
        metrics=("kvrelay_store_used_bytes", "kvrelay_store_capacity_bytes"),
    ),
    _rates(Row.TRANSFER, "Loaded for requests", "Bps", "kvrelay_remote_bytes_read_total"),
    _rates(Row.TRANSFER, "Fallbacks by reason", "reqps", "kvrelay_fallbacks_total", "reason"),
    _rates(Row.TRANSFER, "Failed attempts by fault", "short", "kvrelay_attempts_failed_total", "worker", "fault"),
    *_task_panels(),
)
__all__ = ["PANELS", "RATE", "Panel", "Query"]
