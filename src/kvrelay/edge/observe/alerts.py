"""Alert rules for Prometheus: the questions of `core/doctor`, asked of a longer past.

Every alert carries the code of a rule, its cause and its fix, and uses its thresholds, so an alert, `kvrelay doctor`
and the live page never tell one trouble in two ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from kvrelay.core.doctor.finding import FleetRule, WorkerRule
from kvrelay.core.doctor.rules import RULES
from kvrelay.core.doctor.window_rules import (
    FAILED_RATIO,
    HIT_HIGH,
    HIT_LOW,
    HOT_RATIO,
    HOT_REQUESTS,
    LOWER,
    MIN_ELIGIBLE_TOKENS,
    MIN_SAMPLES,
    NOT_LOWER,
    ORPHANS_GROWN_BLOCKS,
    STALE_RATIO,
    YOUNG_S,
)
from kvrelay.edge.observe.promql import hit_ratio, increase, judged_tokens, observed, quantile
from kvrelay.edge.observe.windows import FAILED

WINDOW = "10m"
RUNBOOKS = "http://127.0.0.1:8001/ui/runbooks"
BY_CODE: Mapping[str, WorkerRule | FleetRule] = {rule.code: rule for rule in RULES}


class Alert(Struct, frozen=True, kw_only=True):
    """`code` is that of a rule. `lasting`: how long it must hold, in PromQL's notation."""

    code: str
    name: str
    severity: str  # page: a person now; ticket: a person today; info: good to know
    expression: str
    lasting: str
    summary: str


def _by_prompt(q: float, cache: str) -> str:
    return quantile("kvrelay_ttft_by_cache_seconds", q, by=("prompt",), where=f'cache="{cache}"', window=WINDOW)


def _enough_of_both() -> str:
    counts = (
        observed("kvrelay_ttft_by_cache_seconds", by=("prompt",), where=f'cache="{cache}"', window=WINDOW)
        for cache in ("warm", "cold")
    )
    return " ".join(f"and on (prompt) ({count} >= {MIN_SAMPLES})" for count in counts)


def _hits(condition: str) -> str:
    return f"and on () ({judged_tokens(WINDOW)} >= {MIN_ELIGIBLE_TOKENS}) and on () ({hit_ratio(WINDOW)} {condition})"


def _hot() -> str:
    active = "sum by (worker) (avg_over_time(kvrelay_active_requests[5m]))"
    others = f"(scalar(sum({active})) - {active}) / (scalar(count({active})) - 1)"
    return f"{active} >= {HOT_REQUESTS:g} and {active} >= {HOT_RATIO:g} * {others}"


def _failed_share() -> str:
    failed = increase("kvrelay_requests_total", where=f'status=~"{"|".join(FAILED)}"', window=WINDOW)
    requests = increase("kvrelay_requests_total", window=WINDOW)
    return f"{failed} / ({requests} >= {MIN_SAMPLES}) > {FAILED_RATIO:g}"


def _stale_share() -> str:
    stale = increase("kvrelay_stale_claim_tokens_total", by=("worker",), window=WINDOW)
    claimed = increase("kvrelay_claimed_tokens_total", by=("worker",), window=WINDOW)
    return f"{stale} / ({claimed} >= {MIN_ELIGIBLE_TOKENS}) > {STALE_RATIO:g}"


ALERTS = (
    Alert(
        code="router",
        name="KvrelayWorkerDown",
        severity="page",
        expression="min by (worker) (kvrelay_worker_up) == 0",
        lasting="1m",
        summary="Worker {{ $labels.worker }} is not healthy.",
    ),
    Alert(
        code="requests_failing",
        name="KvrelayRequestsFailing",
        severity="page",
        expression=_failed_share(),
        lasting="2m",
        summary="{{ $value | humanizePercentage }} of the requests fail.",
    ),
    Alert(
        code="index",
        name="KvrelayIndexUnusable",
        severity="ticket",
        expression="min by (worker) (kvrelay_index_usable) == 0",
        lasting="5m",
        summary="No prompt can be matched with worker {{ $labels.worker }}.",
    ),
    Alert(
        code="remote_slow",
        name="KvrelayHitsNotFaster",
        severity="ticket",
        expression=(
            f"({_by_prompt(0.5, 'warm')} >= {NOT_LOWER:g} * {_by_prompt(0.5, 'cold')}) {_enough_of_both()}"
            f" {_hits(f'>= {HIT_HIGH:g}')}"
        ),
        lasting="10m",
        summary="Much is hit, yet prompts {{ $labels.prompt }} with a hit wait {{ $value | humanizeDuration }} (p50).",
    ),
    Alert(
        code="capacity_or_chunk",
        name="KvrelayHitsRare",
        severity="ticket",
        expression=(
            f"({_by_prompt(0.5, 'warm')} <= {LOWER:g} * {_by_prompt(0.5, 'cold')}) {_enough_of_both()}"
            f" {_hits(f'< {HIT_LOW:g}')}"
        ),
        lasting="30m",
        summary="Hits pay (prompts {{ $labels.prompt }}) and are rare: capacity or chunk size.",
    ),
    Alert(
        code="index_stale",
        name="KvrelayIndexStale",
        severity="ticket",
        expression=_stale_share(),
        lasting="10m",
        summary="{{ $value | humanizePercentage }} of what {{ $labels.worker }} was claimed to hold was not hit.",
    ),
    Alert(
        code="hot_worker",
        name="KvrelayHotWorker",
        severity="ticket",
        expression=_hot(),
        lasting="10m",
        summary="Worker {{ $labels.worker }} has {{ $value | humanize }} requests, far more than the others.",
    ),
    Alert(
        code="breaker_open",
        name="KvrelayBreakerOpen",
        severity="ticket",
        expression="min by (tier) (kvrelay_store_in_use) == 0",
        lasting="1m",
        summary="Tier {{ $labels.tier }} of the store is out of use.",
    ),
    Alert(
        code="orphan_growth",
        name="KvrelayOrphansGrow",
        severity="ticket",
        expression=(
            "max by (worker) (kvrelay_orphan_blocks) - max by (worker) (kvrelay_orphan_blocks offset 10m)"
            f" > {ORPHANS_GROWN_BLOCKS}"
        ),
        lasting="0m",
        summary="{{ $value | humanize }} more blocks of {{ $labels.worker }} wait for parents that nobody announced.",
    ),
    Alert(
        code="cold_cache",
        name="KvrelayColdStart",
        severity="info",
        expression=(
            f"(time() - max by (worker) (kvrelay_worker_joined_timestamp_seconds) < {YOUNG_S:g})"
            f" {_hits(f'< {HIT_HIGH:g}')}"
        ),
        lasting="0m",
        summary="Worker {{ $labels.worker }} began a short while ago and its cache is empty.",
    ),
    Alert(
        code="metrics",
        name="KvrelaySourceUnavailable",
        severity="info",
        expression='min by (worker, source) (kvrelay_source_available{source=~".*_requests|prefix_.*"}) == 0',
        lasting="15m",
        summary="The page of {{ $labels.worker }} has no {{ $labels.source }}: unavailable, not zero.",
    ),
)


def rule_file(runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """As Prometheus reads it, once written as YAML (JSON is YAML)."""
    return {"groups": [{"name": "kvrelay", "rules": [_rule(alert, runbooks) for alert in ALERTS]}]}


def _rule(alert: Alert, runbooks: str) -> dict[str, Any]:
    rule = BY_CODE[alert.code]
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasting,
        "labels": {"severity": alert.severity, "code": alert.code},
        "annotations": {
            "summary": alert.summary,
            "description": f"{rule.cause} {rule.fix}",
            "runbook_url": f"{runbooks}#{alert.code}",
        },
    }
