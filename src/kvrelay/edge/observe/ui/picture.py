"""What the live page shows at one moment, as one JSON object; made once for all who watch.

Rates and the rules look at the last minutes, of which readings are kept every few seconds while somebody watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvrelay.core.doctor.facts import Facts, RouterFacts, WorkerFacts
from kvrelay.core.doctor.finding import Finding, examine
from kvrelay.core.doctor.gateway_rules import GATEWAY_RULES
from kvrelay.core.doctor.window import Window
from kvrelay.core.doctor.window_rules import WINDOW_RULES
from kvrelay.core.model.units import RouteReason
from kvrelay.edge.doctor.gateway import believed
from kvrelay.edge.observe.readings import Readings, Span
from kvrelay.edge.observe.receipt_words import GATES, REASONS
from kvrelay.edge.observe.ui.results import Results
from kvrelay.edge.observe.ui.source import Json, Source
from kvrelay.edge.observe.windows import four_numbers, window

WINDOW_S = 300.0
KEEP_EVERY_S = 5.0
NUMBERS_OVER_S = 15.0  # the four numbers follow quickly
FLOW = 16
HISTORY = 90  # points of the small charts


class Painter:
    """Keeps the readings of the last minutes; `paint` makes the next picture."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._kept: deque[Readings] = deque()
        self._history: deque[tuple[float | None, ...]] = deque(maxlen=HISTORY)

    async def paint(self, *, now_s: float, wall_s: float, results: Results) -> bytes:
        """`now_s` is of the clock of the readings, `wall_s` for people and ages."""
        source = self._source
        reading = await source.readings()
        self._keep(reading, now_s)
        span = Span(self._before(now_s - WINDOW_S), reading)
        numbers = four_numbers(Span(self._before(now_s - NUMBERS_OVER_S), reading))
        self._history.append((numbers.ttft_p50_s, numbers.hit_ratio, numbers.requests_per_s, numbers.kv_usage_ratio))
        seen = window(span, now_s=wall_s)
        status, workers = await source.status(), await source.workers()
        picture = {
            "at_s": wall_s,
            "window_s": span.seconds,
            "gateway": _gateway(status),
            "numbers": numbers,
            "history": list(self._history),
            "findings": msgspec.to_builtins(_findings(status, workers, seen)),
            "workers": _workers(workers, span, wall_s),
            "tokens": _tokens(span),
            "reasons": _reasons(span),
            "statuses": span.increase_by("kvrelay_requests_total", "status"),
            "tiers": _tiers(span),
            "tasks": {**span.after.by("kvrelay_tasks_total", "outcome"), "open": span.after.total("kvrelay_sessions")},
            "flow": [_flow(receipt) for receipt in await source.receipts(FLOW)],
            "results": results,
        }
        return msgspec.json.encode(picture)

    def _keep(self, reading: Readings, now_s: float) -> None:
        while self._kept and self._kept[0].at_s < now_s - WINDOW_S - 2 * KEEP_EVERY_S:
            self._kept.popleft()
        if not self._kept or reading.at_s - self._kept[-1].at_s >= KEEP_EVERY_S:
            self._kept.append(reading)

    def _before(self, at_s: float) -> Readings | None:
        """The oldest one since then, which is not this very one; None: everything since the gateway began counts."""
        old = [one for one in self._kept if one.at_s >= at_s]
        return old[0] if len(old) > 1 else None


def _gateway(status: Mapping[str, Json]) -> Json:
    own = status["gateway"]
    return {
        "version": own.get("version"),
        "uptime_s": own.get("uptime_s"),
        "draining": own.get("draining"),
        "open_requests": own.get("open_requests"),
        "receipts_dropped": own.get("receipts_dropped"),
        "policy": status["policy"],
        "scorer": status["scorer"],
        "index_problem": status.get("index_problem"),
        "queue_depth": status["queue_depth"],
        "sessions": status["sessions"],
        "processes": len(status.get("processes") or ()) or 1,
    }


def _findings(status: Mapping[str, Json], workers: Sequence[Mapping[str, Json]], seen: Window) -> tuple[Finding, ...]:
    """What a gateway can judge of itself; `kvrelay doctor` looks from outside as well."""
    router = RouterFacts(url="this gateway", policy=status["policy"], workers=believed(workers))
    named = tuple(WorkerFacts(name=worker["name"], url=worker["url"]) for worker in workers)
    facts = Facts(policy=status["policy"], workers=named, router=router, window=seen)
    return examine(facts, (*GATEWAY_RULES, *WINDOW_RULES))


def _tokens(span: Span) -> Json:
    def more(name: str) -> float | None:
        return span.increase(f"kvrelay_{name}_tokens_total")

    return {
        "eligible": more("eligible"),
        "claimed": more("claimed"),
        "hit": more("actual_cached"),
        "unaccounted": more("unaccounted_eligible"),
        "gates": [
            {"gate": gate, "words": words, "tokens": span.increase("kvrelay_gate_loss_tokens_total", gate=gate)}
            for gate, words in GATES.items()
        ],
    }


def _reasons(span: Span) -> Json:
    counts = span.increase_by("kvrelay_routed_total", "reason")
    made = ((reason, count) for reason, count in counts.items() if count)
    most_first = sorted(made, key=lambda one: -one[1])
    return [{"reason": name, "words": REASONS[RouteReason(name)], "count": count} for name, count in most_first]


def _tiers(span: Span) -> Json:
    index = span.after.by("kvrelay_index_blocks", "tier")
    hits = span.after.by("kvrelay_reported_cached_tokens", "tier")
    claimed = span.increase_by("kvrelay_claimed_tokens_total", "tier")
    stores = span.after.by("kvrelay_store_bytes_total", "tier")
    return [
        {
            "tier": tier,
            "index_blocks": index.get(tier),
            "claimed_tokens": claimed.get(tier),
            "reported_hit_tokens": hits.get(tier),
            "outcomes": span.increase_by("kvrelay_store_ops_total", "outcome", tier=tier),
            "read_bytes": span.increase("kvrelay_store_bytes_total", tier=tier, direction="read"),
            "p95_s": span.quantile("kvrelay_store_seconds", 0.95, tier=tier),
            "out_of_use": span.after.total("kvrelay_store_in_use", tier=tier) == 0,
        }
        for tier in dict.fromkeys((*index, *hits, *claimed, *stores))
    ]


def _workers(workers: Sequence[Mapping[str, Json]], span: Span, wall_s: float) -> Json:
    requests = span.increase_by("kvrelay_requests_total", "worker")
    claimed = span.increase_by("kvrelay_claimed_tokens_total", "worker")
    actual = span.increase_by("kvrelay_actual_cached_tokens_total", "worker")
    queries, hits = (
        span.increase_by(f"kvrelay_reported_prefix_{what}_tokens", "worker") for what in ("queries", "hits")
    )
    kv = span.after.by("kvrelay_reported_kv_usage_ratio", "worker")
    joined_s = span.after.by("kvrelay_worker_joined_timestamp_seconds", "worker")
    return [
        {
            **_worker(worker),
            "requests": requests.get(name, 0),
            "claimed_tokens": claimed.get(name, 0),
            "hit_tokens": actual.get(name, 0),
            "reported_hit_ratio": hits[name] / queries[name] if queries.get(name) and name in hits else None,
            "kv_usage_ratio": kv.get(name),
            "age_s": wall_s - joined_s[name] if name in joined_s else None,
            "unavailable": [source for source, is_there in _sources(span, name).items() if not is_there],
        }
        for worker in workers
        for name in (worker["name"],)
    ]


def _sources(span: Span, worker: str) -> dict[str, float]:
    return span.after.by("kvrelay_source_available", "source", worker=worker)


def _worker(worker: Mapping[str, Json]) -> dict[str, Any]:
    router = worker.get("router") or {}
    targets = router.get("targets") or ()

    def sum_of(member: str) -> float | None:
        known = [target[member] for target in targets if target.get(member) is not None]
        return sum(known) if known else None

    states = [target["index_state"] for target in targets]
    return {
        "name": worker["name"],
        "url": worker["url"],
        "engine": worker["engine"],
        "version": worker["version"],
        "incarnation": worker["incarnation"],
        "state": "draining" if worker["draining"] else worker["standing"] or "not seen yet",
        "detail": worker["last_probe"]["detail"],
        "active_requests": sum_of("active_requests"),
        "active_prefill_tokens": sum_of("active_prefill_tokens"),
        "reported_running": sum_of("reported_running"),
        "reported_waiting": sum_of("reported_waiting"),
        "index_state": next((s for s in ("unusable", "incomplete", "approximate", "live") if s in states), None),
        "index_blocks": sum(sum(target["index_blocks"].values()) for target in targets),
        "orphan_blocks": sum_of("orphan_blocks"),
    }


_OF_FLOW = (
    "request_id",
    "session_id",
    "chosen_worker",
    "route_reason",
    "status",
    "prompt_tokens",
    "eligible_prefix_tokens",
    "matched_tokens_at_route",
    "actual_cached_tokens",
    "ttft_ms",
    "e2e_ms",
    "fallback_reason",
)


def _flow(receipt: Mapping[str, Json]) -> Json:
    words = REASONS[RouteReason(receipt["route_reason"])]
    return {**{name: receipt.get(name) for name in _OF_FLOW}, "words": words}
