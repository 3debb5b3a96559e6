"""Gauges, read from the router's own status at the moment of a scrape. Ranks of one worker are summed.

What a worker does not report has no sample: absent is not zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvrelay.core.model.units import IndexState
from kvrelay.core.routing.status import RouterStatus, TargetStatus, WorkerStatus

BOOKED = {
    "active_requests": ("kvrelay_active_requests", "Requests that we sent to the worker and that have not ended."),
    "active_prefill_tokens": ("kvrelay_active_prefill_tokens", "Prompt tokens booked there and not yet computed."),
    "active_decode_blocks": ("kvrelay_active_decode_blocks", "KV blocks of running generations, as booked."),
    "orphan_blocks": ("kvrelay_orphan_blocks", "Announced blocks whose parent is unknown."),
}
REPORTED = {
    "reported_running": ("kvrelay_reported_running_requests", "Running requests according to the worker."),
    "reported_waiting": ("kvrelay_reported_waiting_requests", "Waiting requests according to the worker."),
}

# Of several processes of one gateway. "sum": each has its own part; "max": all look at the same thing, and some are
# behind; "min": it holds only if it holds for all.
GAUGE_RULES: Mapping[str, Literal["sum", "max", "min"]] = {
    "kvrelay_active_requests": "sum",
    "kvrelay_active_prefill_tokens": "sum",
    "kvrelay_active_decode_blocks": "sum",
    "kvrelay_queue_depth": "sum",
    "kvrelay_orphan_blocks": "max",
    "kvrelay_reported_running_requests": "max",
    "kvrelay_reported_waiting_requests": "max",
    "kvrelay_reported_kv_usage_ratio": "max",
    "kvrelay_index_blocks": "max",
    "kvrelay_index_usable": "min",
    "kvrelay_reported_cached_tokens": "max",
    "kvrelay_sessions": "max",
    "kvrelay_worker_up": "min",
}

Sample = tuple[Sequence[str], float]


def gauges(status: RouterStatus, configured: Iterable[str]) -> Iterator[Metric]:
    """`configured` names all workers of the fleet, also those that have not answered yet."""
    workers = status.workers
    for attribute, (name, meaning) in BOOKED.items():
        values = [((worker.name,), sum(getattr(target, attribute) for target in worker.targets)) for worker in workers]
        yield _gauge(name, meaning, ("worker",), values)
    for attribute, (name, meaning) in REPORTED.items():
        yield _gauge(name, meaning, ("worker",), _reported(workers, attribute))
    yield _gauge(
        "kvrelay_reported_kv_usage_ratio",
        "Share of KV blocks in use, according to the worker.",
        ("worker",),
        _kv_usage(workers),
    )
    yield _gauge("kvrelay_index_blocks", "Blocks believed to be there.", ("worker", "tier"), _index_blocks(workers))
    yield _gauge("kvrelay_index_usable", "1 if prompts can be matched with it.", ("worker",), _index_usable(workers))
    yield _drifted(workers)
    yield _gauge("kvrelay_worker_up", "1 if the worker is healthy.", ("worker",), _up(workers, configured))
    yield _gauge("kvrelay_queue_depth", "Requests that wait for a free worker.", (), [((), status.queue_depth)])
    yield _gauge("kvrelay_sessions", "Session bindings.", (), [((), status.sessions)])


def _gauge(name: str, meaning: str, labels: Sequence[str], samples: Iterable[Sample]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _reported(workers: Iterable[WorkerStatus], attribute: str) -> Iterator[Sample]:
    for worker in workers:
        known = _known(worker.targets, attribute)
        if known:
            yield (worker.name,), sum(known)


def _kv_usage(workers: Iterable[WorkerStatus]) -> Iterator[Sample]:
    for worker in workers:
        known = _known(worker.targets, "reported_kv_usage_ratio")
        if known:
            yield (worker.name,), sum(known) / len(known)


def _known(targets: Iterable[TargetStatus], attribute: str) -> list[float]:
    values = (getattr(target, attribute) for target in targets)
    return [value for value in values if value is not None]


def _index_usable(workers: Iterable[WorkerStatus]) -> Iterator[Sample]:
    for worker in workers:
        yield (worker.name,), any(target.index_state is not IndexState.UNUSABLE for target in worker.targets)


def _drifted(workers: Iterable[WorkerStatus]) -> Metric:
    meaning = "Requests whose claim differed from the actual hit by more than a block, and no event explains it."
    family = CounterMetricFamily("kvrelay_drifted_requests", meaning, labels=("worker", "kind"))
    for worker in workers:
        for kind in ("over_claim", "under_claim"):
            known = [getattr(target.drift, kind) for target in worker.targets if target.drift is not None]
            if known:
                family.add_metric((worker.name, kind), sum(known))
    return family


def _index_blocks(workers: Iterable[WorkerStatus]) -> Iterator[Sample]:
    for worker in workers:
        blocks: dict[str, int] = {}
        for target in worker.targets:
            for tier, count in target.index_blocks.items():
                blocks[tier] = blocks.get(tier, 0) + count
        for tier, count in blocks.items():
            yield (worker.name, tier), count


def _up(workers: Iterable[WorkerStatus], configured: Iterable[str]) -> Iterator[Sample]:
    up: Mapping[str, bool] = {worker.name: worker.up for worker in workers}
    for name in dict.fromkeys((*configured, *up)):
        yield (name,), up.get(name, False)
