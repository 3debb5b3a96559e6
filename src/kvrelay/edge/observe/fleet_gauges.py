"""What workers report on their own pages and what is configured of them, as gauges.

A worker's counters are gauges here: they are another's, several gateway processes see one and the same, and they begin
anew with each of its lives. What its page does not carry has no sample, and `kvrelay_source_available` is 0 for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from prometheus_client.metrics_core import Metric

from kvrelay.edge.connectors.base import Scrape
from kvrelay.edge.fleet.view import WorkerView
from kvrelay.edge.observe.gauges import Sample, gauge
from kvrelay.edge.system.config import Config

SOURCES = (
    "running_requests",
    "waiting_requests",
    "kv_usage_ratio",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "hits_by_tier_tokens",
)
"""Canonical names of what a worker's page may carry and we pass on."""


class Costs(Struct, frozen=True):
    """As configured; what is not is None or missing."""

    gpus: Mapping[str, int] = {}  # per worker
    gpu_hour_price: float | None = None


def costs_of(config: Config) -> Costs:
    known = {worker.name: worker.gpus for worker in config.workers if worker.gpus is not None}
    return Costs(known, config.observe.gpu_hour_price)


def fleet_gauges(views: Iterable[WorkerView], costs: Costs, joined_s: Mapping[str, float]) -> Iterator[Metric]:
    scrapes = {view.name: view.last_scrape for view in views if view.worker is not None}
    known = {name: scrape for name, scrape in scrapes.items() if scrape is not None}
    yield gauge("kvrelay_reported_cached_tokens", _by_tier(known))
    for source in ("prefix_queries_tokens", "prefix_hits_tokens"):
        yield gauge(f"kvrelay_reported_{source}", _totals(known, source))
    yield gauge("kvrelay_source_available", _availability(scrapes))
    yield gauge("kvrelay_worker_joined_timestamp_seconds", [((name,), at_s) for name, at_s in joined_s.items()])
    yield gauge("kvrelay_worker_gpus", [((name,), gpus) for name, gpus in costs.gpus.items()])
    price = costs.gpu_hour_price
    yield gauge("kvrelay_gpu_hour_price", [] if price is None else [((), price)])


def unavailable(scrape: Scrape | None) -> tuple[str, ...]:
    """Canonical names that the worker's page did not carry when it was last read."""
    return tuple(source for source in SOURCES if not _carries(scrape, source))


def _carries(scrape: Scrape | None, source: str) -> bool:
    if scrape is None:
        return False
    match source:
        case "hits_by_tier_tokens":
            return bool(scrape.hits_by_tier_tokens)
        case "prefix_queries_tokens" | "prefix_hits_tokens":
            return getattr(scrape, source) is not None
        case _:
            return any(getattr(rank, source) is not None for rank in scrape.ranks.values())


def _availability(scrapes: Mapping[str, Scrape | None]) -> Iterator[Sample]:
    for name, scrape in scrapes.items():
        missing = unavailable(scrape)
        for source in SOURCES:
            yield (name, source), source not in missing


def _by_tier(scrapes: Mapping[str, Scrape]) -> Iterator[Sample]:
    for name, scrape in scrapes.items():
        for tier, tokens in scrape.hits_by_tier_tokens.items():
            yield (name, tier), tokens


def _totals(scrapes: Mapping[str, Scrape], source: str) -> Iterator[Sample]:
    for name, scrape in scrapes.items():
        tokens: int | None = getattr(scrape, source)
        if tokens is not None:
            yield (name,), tokens
