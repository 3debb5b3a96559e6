"""Everything on /metrics, under the names that dashboards rely on.

Counting happens on the request path and must cost next to nothing, so counters here are numbers in dictionaries and
the Prometheus objects are built when somebody reads the page. Gauges are read from the router at that moment too.
Label values come from configuration and closed vocabularies only; a worker that left takes its series along.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvrelay.core.model.effects import Report
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.routing.status import RouterStatus
from kvrelay.edge.observe.gauges import gauges

TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6, 3.2)
E2E_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1)
NO_WORKER = "none"  # label of requests that reached no worker
# Paths that have a label of their own; clients may ask for any other, so those share one.
COUNTED_PATHS = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/models",
        "/v1/rerank",
        "/v1/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/detokenize",
        "/pooling",
        "/tokenize",
    )
)
OTHER_PATH = "other"
GATES = ("prefix", "route", "residency", "transfer")

Labels = tuple[str, ...]


class Counter:
    """A number per combination of label values."""

    def __init__(self, name: str, meaning: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.meaning = meaning
        self.labels = tuple(labels)
        self.values: dict[Labels, float] = {} if labels else {(): 0}

    def add(self, values: Labels, amount: float = 1) -> None:
        self.values[values] = self.values.get(values, 0) + amount

    def forget(self, label: str, value: str) -> None:
        if label in self.labels:
            at = self.labels.index(label)
            self.values = {values: number for values, number in self.values.items() if values[at] != value}

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name.removesuffix("_total"), self.meaning, labels=self.labels)
        for values, number in list(self.values.items()):
            family.add_metric(values, number)
        return family


class Histogram:
    """Counts per bucket; `bounds` are upper limits in seconds."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.meaning = meaning
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    def family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.meaning)
        limits = [repr(float(bound)) for bound in self.bounds] + ["+Inf"]
        family.add_metric([], list(zip(limits, accumulate(self.counts), strict=True)), self.sum_s)
        return family


class Metrics(Collector):
    """Counts what it is told and renders the page."""

    def __init__(self) -> None:
        self.requests = Counter(
            "kvrelay_requests_total", "Client requests by their one terminal status.", ("worker", "policy", "status")
        )
        self.attempts_failed = Counter(
            "kvrelay_attempts_failed_total", "Attempts that ended badly, retried or not.", ("worker", "fault")
        )
        self.migrations = Counter(
            "kvrelay_migrations_total", "Streams that went on at this worker after another one was lost.", ("worker",)
        )
        self.spills = Counter(
            "kvrelay_spills_total", "Requests sent away from the best cache or their session's worker: too busy."
        )
        self.unscored = Counter(
            "kvrelay_unscored_total", "Requests routed without matching their prompt.", ("path", "because")
        )
        self.claimed = Counter(
            "kvrelay_claimed_tokens_total", "Cached tokens believed at routing time.", ("worker", "tier")
        )
        self.actual = Counter(
            "kvrelay_actual_cached_tokens_total", "Cached tokens reported by the engine.", ("worker", "tier")
        )
        self.eligible = Counter("kvrelay_eligible_tokens_total", "Prompt tokens that could have been cached.")
        self.gate_loss = Counter("kvrelay_gate_loss_tokens_total", "Eligible tokens lost, by gate.", ("gate",))
        self.events = Counter("kvrelay_events_total", "KV events received.", ("worker", "kind"))
        self.gaps = Counter("kvrelay_event_gaps_total", "Holes seen in an event sequence.", ("worker",))
        self.resyncs = Counter(
            "kvrelay_index_resyncs_total", "Resyncs because claims and actual hits drifted apart.", ("worker",)
        )
        self.unknown_topics = Counter(
            "kvrelay_events_unknown_topic_total",
            "Event messages on a shared socket that are no worker's.",
            ("endpoint",),
        )
        self.malformed = Counter("kvrelay_events_malformed_total", "Event messages that broke the format.", ("worker",))
        self.unauthorized = Counter(
            "kvrelay_unauthorized_total", "Requests without a valid API key; the only ones without a receipt."
        )
        self.reports = Counter("kvrelay_reports_total", "What the router reported, by kind.", ("kind",))
        self.ttft = Histogram("kvrelay_ttft_seconds", "Arrival to first token.", TTFT_S)
        self.itl = Histogram("kvrelay_itl_seconds", "Gaps between output chunks.", ITL_S)
        self.e2e = Histogram("kvrelay_e2e_seconds", "Arrival to end.", E2E_S)
        self.decision = Histogram("kvrelay_decision_seconds", "Routing decision, hashing apart.", DECISION_S)
        self._gauges: Callable[[], Iterable[Metric]] = tuple
        self._hits_by_tier: Callable[[], Mapping[str, Mapping[str, int]]] | None = None
        self._token_lookups: Callable[[], tuple[int, int]] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        for gate in GATES:
            self.gate_loss.add((gate,), 0)

    def bind_hits(self, by_tier: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        """Where totals of hits per worker and tier are read, as the workers themselves count them."""
        self._hits_by_tier = by_tier

    def bind(self, status: Callable[[], RouterStatus], workers: Callable[[], Iterable[str]] = tuple) -> None:
        """Where gauges are read from at each scrape: the router, and the names of all workers of the fleet."""
        self._gauges = lambda: gauges(status(), workers())

    def bind_tokens(self, lookups: Callable[[], tuple[int, int]]) -> None:
        """Where hits and misses of the segment cache are read; without it the page does not have them."""
        self._token_lookups = lookups

    def observe_receipt(self, receipt: Receipt) -> None:
        worker = receipt.chosen_worker or NO_WORKER
        self.requests.add((worker, receipt.policy, receipt.status.value))
        for attempt in receipt.attempts:
            if attempt.fault is not None:
                self.attempts_failed.add((attempt.worker, attempt.fault.value))
            if attempt.continued:
                self.migrations.add((attempt.worker,))
        if receipt.spilled_from is not None:
            self.spills.add(())
        if receipt.unscored_because is not None:
            path = receipt.path if receipt.path in COUNTED_PATHS else OTHER_PATH
            self.unscored.add((path, receipt.unscored_because))
        self._observe_tokens(worker, receipt)
        self._observe_times(receipt)

    def count_report(self, report: Report) -> None:
        self.reports.add((report.kind,), report.count)
        if report.kind == "event_gap" and report.worker is not None:
            self.gaps.add((report.worker,), report.count)
        if report.kind == "tail_drift" and report.worker is not None:
            self.resyncs.add((report.worker,), report.count)

    def count_events(self, worker: str, kinds: Mapping[str, int]) -> None:
        for kind, count in kinds.items():
            self.events.add((worker, kind), count)

    def count_malformed(self, worker: str) -> None:
        self.malformed.add((worker,))

    def count_unknown_topic(self, endpoint: str) -> None:
        self.unknown_topics.add((endpoint,))

    def forget_worker(self, worker: str) -> None:
        """The worker was removed: its series go."""
        for counter in self._counters():
            counter.forget("worker", worker)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        histograms = (self.ttft, self.itl, self.e2e, self.decision)
        for counter in self._counters():
            yield counter.family()
        for histogram in histograms:
            yield histogram.family()
        yield from self._gauges()
        if self._hits_by_tier is not None:
            yield _reported_hits(self._hits_by_tier())
        if self._token_lookups is not None:
            hits, misses = self._token_lookups()
            yield CounterMetricFamily("kvrelay_token_cache_hits", "Pieces of prompts whose token ids were known.", hits)
            yield CounterMetricFamily("kvrelay_token_cache_misses", "Pieces of prompts that were tokenized.", misses)

    def _observe_tokens(self, worker: str, receipt: Receipt) -> None:
        for tier, tokens in (receipt.matched_tiers_at_route or {}).items():
            self.claimed.add((worker, tier), tokens)
        if receipt.actual_cached_tokens is not None:
            self.actual.add((worker, "engine"), receipt.actual_cached_tokens)
        if receipt.eligible_prefix_tokens is not None:
            self.eligible.add((), receipt.eligible_prefix_tokens)
        loss = receipt.gate_loss_tokens
        if loss is not None:
            for gate, tokens in zip(GATES, (loss.prefix, loss.route, loss.residency, loss.transfer), strict=True):
                self.gate_loss.add((gate,), tokens)

    def _observe_times(self, receipt: Receipt) -> None:
        if receipt.ttft_ms is not None:
            self.ttft.observe(receipt.ttft_ms / 1e3)
        for gap_ms in receipt.itl_ms:
            self.itl.observe(gap_ms / 1e3)
        if receipt.e2e_ms is not None:
            self.e2e.observe(receipt.e2e_ms / 1e3)
        if receipt.decision_us is not None:
            self.decision.observe(receipt.decision_us / 1e6)

    def _counters(self) -> tuple[Counter, ...]:
        return (
            self.requests,
            self.attempts_failed,
            self.migrations,
            self.spills,
            self.unscored,
            self.claimed,
            self.actual,
            self.eligible,
            self.gate_loss,
            self.events,
            self.gaps,
            self.resyncs,
            self.malformed,
            self.unknown_topics,
            self.unauthorized,
            self.reports,
        )


def _reported_hits(by_tier: Mapping[str, Mapping[str, int]]) -> Metric:
    """A gauge, for it is another's counter: several gateway processes see one and the same."""
    meaning = "Cached tokens by the worker's own count since its start, where it tells tiers apart."
    family = GaugeMetricFamily("kvrelay_reported_cached_tokens", meaning, labels=("worker", "tier"))
    for worker, tiers in by_tier.items():
        for tier, tokens in tiers.items():
            family.add_metric((worker, tier), tokens)
    return family
