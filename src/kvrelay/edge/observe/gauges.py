"""Gauges, read from the router's own status at the moment of a scrape. Ranks of one worker are summed.

What a worker does not report has no sample: absent is not zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvrelay.core.model.units import IndexState
from kvrelay.core.routing.status import RouterStatus, TargetStatus, WorkerStatus
from kvrelay.edge.observe.metric_table import METRICS

BOOKED = ("active_requests", "active_prefill_tokens", "active_decode_blocks", "orphan_blocks")
REPORTED = {
    "reported_running": "kvrelay_reported_running_requests",
    "reported_waiting": "kvrelay_reported_waiting_requests",
}

Sample = tuple[Sequence[str], float]


def gauges(status: RouterStatus, configured: Iterable[str]) -> Iterator[Metric]:
    """`configured` names all workers of the fleet, also those that have not answered yet."""
    workers = status.workers
    for attribute in BOOKED:
        values = [((worker.name,), sum(getattr(target, attribute) for target in worker.targets)) for worker in workers]
        yield gauge(f"kvrelay_{attribute}", values)
    for attribute, name in REPORTED.items():
        yield gauge(name, _reported(workers, attribute))
    yield gauge("kvrelay_reported_kv_usage_ratio", _kv_usage(workers))
    yield gauge("kvrelay_index_blocks", _index_blocks(workers))
    yield gauge("kvrelay_index_usable", _index_usable(workers))
    yield counter("kvrelay_drifted_requests_total", _drifted(workers))
    yield gauge("kvrelay_worker_up", _up(workers, configured))
    yield gauge("kvrelay_queue_depth", [((), status.queue_depth)])
    yield gauge("kvrelay_sessions", [((), status.sessions)])


def gauge(name: str, samples: Iterable[Sample]) -> Metric:
    spec = METRICS[name]
    family = GaugeMetricFamily(name, spec.meaning, labels=spec.labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def counter(name: str, samples: Iterable[Sample]) -> Metric:
    spec = METRICS[name]
    family = CounterMetricFamily(name.removesuffix("_total"), spec.meaning, labels=spec.labels)
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


def _drifted(workers: Iterable[WorkerStatus]) -> Iterator[Sample]:
    for worker in workers:
        for kind in ("over_claim", "under_claim"):
            known = [getattr(target.drift, kind) for target in worker.targets if target.drift is not None]
            if known:
                yield (worker.name, kind), sum(known)


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
