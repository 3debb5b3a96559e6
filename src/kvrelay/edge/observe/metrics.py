"""Everything on /metrics, under the names that dashboards rely on.

Counting happens on the request path and must cost next to nothing, so counters here are numbers in dictionaries and
the Prometheus objects are built when somebody reads the page. Gauges are read from the router at that moment too, and
what follows from other numbers is worked out then. Label values come from configuration and closed vocabularies only; a
worker that left takes its series along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvrelay.core.model.effects import Report
from kvrelay.core.model.units import DEADLINE_UNREACHABLE, FallbackReason, RouteReason
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.receipts.tasks import TaskLedger
from kvrelay.core.routing.status import RouterStatus
from kvrelay.edge.fleet.view import WorkerView
from kvrelay.edge.observe.fleet_gauges import Costs, fleet_gauges
from kvrelay.edge.observe.gauges import counter, gauges
from kvrelay.edge.observe.instruments import DECISION_S, E2E_S, ITL_S, TTFT_S, Counter, Histogram
from kvrelay.edge.observe.task_counts import TaskCounts

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
CACHE_STATES = ("warm", "cold")
DEADLINE_OUTCOMES = ("kept", "missed", "refused", "unseen")
PROMPT_CLASSES = ((1024, "up_to_1k"), (4096, "up_to_4k"), (16384, "up_to_16k"))
LONGEST_PROMPTS = "over_16k"


class Metrics(Collector):
    """Counts what it is told and renders the page."""

    def __init__(self, *, tasks: TaskLedger | None = None) -> None:
        """`tasks`: where sessions are followed; whoever counts those that are over calls `bind_tasks`."""
        self.requests = Counter("kvrelay_requests_total")
        self.routed = Counter("kvrelay_routed_total")
        self.attempts_failed = Counter("kvrelay_attempts_failed_total")
        self.retries = Counter("kvrelay_retries_total")
        self.fallbacks = Counter("kvrelay_fallbacks_total")
        self.migrations = Counter("kvrelay_migrations_total")
        self.spills = Counter("kvrelay_spills_total")
        self.deadlines = Counter("kvrelay_deadlines_total")
        self.unscored = Counter("kvrelay_unscored_total")
        self.claimed = Counter("kvrelay_claimed_tokens_total")
        self.stale_claims = Counter("kvrelay_stale_claim_tokens_total")
        self.actual = Counter("kvrelay_actual_cached_tokens_total")
        self.prompt_tokens = Counter("kvrelay_prompt_tokens_total")
        self.completion_tokens = Counter("kvrelay_completion_tokens_total")
        self.eligible = Counter("kvrelay_eligible_tokens_total")
        self.unaccounted = Counter("kvrelay_unaccounted_eligible_tokens_total")
        self.gate_loss = Counter("kvrelay_gate_loss_tokens_total")
        self.remote_bytes = Counter("kvrelay_remote_bytes_read_total")
        self.events = Counter("kvrelay_events_total")
        self.gaps = Counter("kvrelay_event_gaps_total")
        self.resyncs = Counter("kvrelay_index_resyncs_total")
        self.unknown_topics = Counter("kvrelay_events_unknown_topic_total")
        self.malformed = Counter("kvrelay_events_malformed_total")
        self.unauthorized = Counter("kvrelay_unauthorized_total")
        self.reports = Counter("kvrelay_reports_total")
        self.ttft = Histogram("kvrelay_ttft_seconds", TTFT_S)
        prompts = [name for _, name in PROMPT_CLASSES] + [LONGEST_PROMPTS]
        by_cache = [(cache, prompt) for cache in CACHE_STATES for prompt in prompts]
        self.ttft_by_cache = Histogram("kvrelay_ttft_by_cache_seconds", TTFT_S, by_cache)
        self.itl = Histogram("kvrelay_itl_seconds", ITL_S)
        self.e2e = Histogram("kvrelay_e2e_seconds", E2E_S)
        self.decision = Histogram("kvrelay_decision_seconds", DECISION_S)
        self._counters = tuple(each for each in vars(self).values() if isinstance(each, Counter))
        self._histograms = tuple(each for each in vars(self).values() if isinstance(each, Histogram))
        self._tasks = tasks
        self._read: list[Callable[[], Iterable[Metric]]] = []
        self._joined_s: dict[str, float] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        for counter_of, words in (
            (self.gate_loss, GATES),
            (self.routed, RouteReason),
            (self.fallbacks, FallbackReason),
            (self.deadlines, DEADLINE_OUTCOMES),
        ):
            for word in words:
                counter_of.add((str(word),), 0)  # nothing happened yet, which is known

    # --- where the rest of the page is read at each scrape -----------------------------------------------------------

    def bind(self, status: Callable[[], RouterStatus], workers: Callable[[], Iterable[str]] = tuple) -> None:
        """Gauges: from the router, and the names of all workers of the fleet."""
        self._read.append(lambda: gauges(status(), workers()))

    def bind_fleet(self, views: Callable[[], Iterable[WorkerView]], costs: Callable[[], Costs]) -> None:
        """What workers say on their own pages, and what they cost."""
        self._read.append(lambda: fleet_gauges(views(), costs(), self._joined_s))

    def bind_tokens(self, lookups: Callable[[], tuple[int, int]]) -> None:
        """Hits and misses of the segment cache; without it the page does not have them."""
        self._read.append(lambda: _token_lookups(*lookups()))

    def bind_tasks(self, tasks: TaskCounts, now_ms: Callable[[], float]) -> None:
        """Sessions that are over; in a group, the group counts them."""
        self._read.append(lambda: tasks.families(now_ms()))

    # --- what is counted ---------------------------------------------------------------------------------------------

    def observe_receipt(self, receipt: Receipt) -> None:
        worker = receipt.chosen_worker or NO_WORKER
        self.requests.add((worker, receipt.policy, receipt.status))
        self.routed.add((receipt.route_reason,))
        attempts = receipt.attempts
        if len(attempts) != 1 or attempts[0].fault is not None:
            self._observe_attempts(receipt)
        if receipt.fallback_reason is not None:
            self.fallbacks.add((receipt.fallback_reason,))
        if receipt.spilled_from is not None:
            self.spills.add(())
        if receipt.unscored_because is not None:
            path = receipt.path if receipt.path in COUNTED_PATHS else OTHER_PATH
            self.unscored.add((path, receipt.unscored_because))
        if receipt.deadline_ms is not None:
            self.deadlines.add((_deadline_outcome(receipt, receipt.deadline_ms),))
        self._observe_tokens(worker, receipt)
        self._observe_times(receipt)
        if self._tasks is not None:
            self._tasks.observe(receipt)

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

    def worker_joined(self, worker: str, at_s: float) -> None:
        """A life of it began, or was first seen, at this wall time."""
        self._joined_s[worker] = at_s

    def forget_worker(self, worker: str) -> None:
        """The worker was removed: its series go."""
        self._joined_s.pop(worker, None)
        for each in self._counters:
            each.forget("worker", worker)

    # --- the page ----------------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        return self.render_for("")[0]

    def render_for(self, accept: str) -> tuple[bytes, str]:
        """In the format that an Accept header asks for, with its content type."""
        return render(self._registry, accept)

    def collect(self) -> Iterator[Metric]:
        yield from (each.family() for each in self._counters)
        yield from (each.family() for each in self._histograms)
        yield counter("kvrelay_recomputed_tokens_total", [((), self.gate_loss.total())])
        for read in self._read:
            yield from read()

    def _observe_attempts(self, receipt: Receipt) -> None:
        """Any but the usual one that went well."""
        for attempt in receipt.attempts:
            if attempt.fault is not None:
                self.attempts_failed.add((attempt.worker, attempt.fault.value))
            if attempt.continued:
                self.migrations.add((attempt.worker,))
        if len(receipt.attempts) > 1:
            self.retries.add((), len(receipt.attempts) - 1)

    def _observe_tokens(self, worker: str, receipt: Receipt) -> None:
        for tier, tokens in (receipt.matched_tiers_at_route or {}).items():
            self.claimed.add((worker, tier), tokens)
        actual, claimed = receipt.actual_cached_tokens, receipt.matched_tokens_at_route
        if actual is not None:
            self.actual.add((worker, "engine"), actual)
            if claimed is not None:  # also where nothing was stale: it was compared
                self.stale_claims.add((worker,), claimed - actual if claimed > actual else 0)
        loss = receipt.gate_loss_tokens
        if receipt.eligible_prefix_tokens is not None:
            self.eligible.add((), receipt.eligible_prefix_tokens)
            if loss is None:
                self.unaccounted.add((), receipt.eligible_prefix_tokens)
        if loss is not None:
            if loss.prefix:
                self.gate_loss.add(("prefix",), loss.prefix)
            if loss.route:
                self.gate_loss.add(("route",), loss.route)
            if loss.residency:
                self.gate_loss.add(("residency",), loss.residency)
            if loss.transfer:
                self.gate_loss.add(("transfer",), loss.transfer)
        if receipt.prompt_tokens is not None:
            self.prompt_tokens.add((), receipt.prompt_tokens)
        if receipt.completion_tokens is not None:
            self.completion_tokens.add((), receipt.completion_tokens)
        if receipt.remote_bytes_read is not None:
            self.remote_bytes.add((), receipt.remote_bytes_read)

    def _observe_times(self, receipt: Receipt) -> None:
        request_id = receipt.request_id
        if receipt.ttft_ms is not None:
            ttft_s = receipt.ttft_ms / 1e3
            self.ttft.observe(ttft_s, request_id)
            actual, prompt = receipt.actual_cached_tokens, receipt.prompt_tokens
            if actual is not None and prompt:
                self.ttft_by_cache.observe(
                    ttft_s, request_id, ("warm" if 2 * actual >= prompt else "cold", _class(prompt))
                )
        if receipt.itl_ms:
            self.itl.observe_all(receipt.itl_ms)
        if receipt.e2e_ms is not None:
            self.e2e.observe(receipt.e2e_ms / 1e3, request_id)
        if receipt.decision_us is not None:
            self.decision.observe(receipt.decision_us / 1e6, request_id)


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The page and its content type: OpenMetrics, which has exemplars, for whoever accepts it."""
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


def _deadline_outcome(receipt: Receipt, deadline_ms: float) -> str:
    """`unseen`: an answer in one piece, or none, has no first token that the gateway could see."""
    if receipt.failure_reason == DEADLINE_UNREACHABLE:
        return "refused"
    if receipt.ttft_ms is None:
        return "unseen"
    return "kept" if receipt.ttft_ms <= deadline_ms else "missed"


def _class(prompt_tokens: int) -> str:
    for limit, name in PROMPT_CLASSES:
        if prompt_tokens <= limit:
            return name
    return LONGEST_PROMPTS


def _token_lookups(hits: int, misses: int) -> Iterator[Metric]:
    yield counter("kvrelay_token_cache_hits_total", [((), hits)])
    yield counter("kvrelay_token_cache_misses_total", [((), misses)])
