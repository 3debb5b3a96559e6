"""The metrics page: names, values from receipts, gauges from the router, and series that go with their worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.core.model.effects import Report
from kvrelay.core.model.events import LoadReported, WorkerJoined, WorkerSpec
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.units import FallbackReason, Fault, RouteReason, Status
from kvrelay.core.receipts.receipt import Attempt, GateLoss
from kvrelay.core.receipts.tasks import TaskLedger
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.edge.observe.metric_table import METRICS
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.observe.metrics_join import compare, totals_of_page
from kvrelay.edge.observe.task_counts import TaskCounts
from tests.edge.observe.samples import receipt

A = WorkerId("A", "1")


def samples(metrics: Metrics) -> dict[str, float]:
    """`name{label="value",...}` -> value, labels in alphabetical order."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_a_receipt_moves_every_counter_it_speaks_of() -> None:
    metrics = Metrics()
    metrics.observe_receipt(receipt())
    found = samples(metrics)
    assert found['kvrelay_requests_total{policy="cache_load",status="ok",worker="B"}'] == 1
    assert found["kvrelay_spills_total"] == 1
    assert found['kvrelay_claimed_tokens_total{tier="gpu",worker="B"}'] == 1280
    assert found['kvrelay_actual_cached_tokens_total{tier="engine",worker="B"}'] == 1216
    assert found["kvrelay_eligible_tokens_total"] == 1600
    assert found['kvrelay_gate_loss_tokens_total{gate="route"}'] == 320
    assert (found["kvrelay_itl_seconds_count"], found["kvrelay_itl_seconds_sum"]) == (2, pytest.approx(0.02))
    assert (found["kvrelay_e2e_seconds_count"], found["kvrelay_e2e_seconds_sum"]) == (1, pytest.approx(0.08025))
    assert found['kvrelay_ttft_seconds_bucket{le="0.025"}'] == 0
    assert found['kvrelay_ttft_seconds_bucket{le="0.05"}'] == 1


@pytest.mark.covers("RT-27")
def test_the_decision_time_is_exported_with_buckets_that_can_tell() -> None:
    metrics = Metrics()
    for decision_us in (12.0, 140.0, 900.0):
        metrics.observe_receipt(receipt(decision_us=decision_us))
    found = samples(metrics)
    assert [found[f'kvrelay_decision_seconds_bucket{{le="{le}"}}'] for le in ("2e-05", "0.00015", "0.001", "+Inf")] == [
        1,
        2,
        3,
        3,
    ]


def test_what_a_receipt_does_not_know_moves_nothing() -> None:
    metrics = Metrics()
    metrics.observe_receipt(
        receipt(
            chosen_worker=None,
            matched_tiers_at_route=None,
            actual_cached_tokens=None,
            eligible_prefix_tokens=None,
            gate_loss_tokens=None,
            ttft_ms=None,
            itl_ms=(),
            e2e_ms=None,
            decision_us=None,
            prompt_tokens=None,
            completion_tokens=None,
            spilled_from=None,
            status=Status.REFUSED,
        )
    )
    found = samples(metrics)
    assert found['kvrelay_requests_total{policy="cache_load",status="refused",worker="none"}'] == 1
    moved = {
        name for name, value in found.items() if value and not name.startswith(("kvrelay_requests", "kvrelay_routed"))
    }
    assert moved == set()


@pytest.mark.covers("S20")
def test_unscored_requests_are_counted_by_path_and_reason_and_clients_make_up_no_labels() -> None:
    metrics = Metrics()
    for path in ("/v1/responses", "/v1/responses", "/random/1", "/v1/responses?x=1"):
        metrics.observe_receipt(receipt(path=path, unscored_because="path_not_scored"))
    metrics.observe_receipt(receipt(path="/v1/chat/completions", unscored_because="multimodal_input"))
    metrics.observe_receipt(receipt(path="/v1/completions"))
    assert {name: value for name, value in samples(metrics).items() if name.startswith("kvrelay_unscored_total")} == {
        'kvrelay_unscored_total{because="path_not_scored",path="/v1/responses"}': 2,
        'kvrelay_unscored_total{because="path_not_scored",path="other"}': 2,
        'kvrelay_unscored_total{because="multimodal_input",path="/v1/chat/completions"}': 1,
    }


def test_failed_attempts_are_counted_where_they_failed() -> None:
    metrics = Metrics()
    failed = Attempt(1, "A", "1", 0, RouteReason.ROUND_ROBIN, 0.5, Fault.CONNECT)
    metrics.observe_receipt(receipt(attempts=(failed,)))
    assert samples(metrics)['kvrelay_attempts_failed_total{fault="connect",worker="A"}'] == 1


def test_migrations_are_counted_where_the_stream_went_on() -> None:
    metrics = Metrics()
    lost = Attempt(1, "A", "1", 0, RouteReason.ROUND_ROBIN, 0.5, Fault.RESET)
    rest = Attempt(2, "B", "1", 0, RouteReason.ROUND_ROBIN, 9.5, continued=True)
    metrics.observe_receipt(receipt(attempts=(lost, rest)))
    seen = samples(metrics)
    assert seen['kvrelay_migrations_total{worker="B"}'] == 1
    assert seen['kvrelay_attempts_failed_total{fault="reset",worker="A"}'] == 1


def test_reports_of_the_router_are_counted() -> None:
    metrics = Metrics()
    metrics.count_report(Report("event_gap", "A"))
    metrics.count_report(Report("orphans_dropped", "A", count=7))
    found = samples(metrics)
    assert found['kvrelay_event_gaps_total{worker="A"}'] == 1
    assert found['kvrelay_reports_total{kind="orphans_dropped"}'] == 7


def bound() -> tuple[Metrics, Router]:
    router = Router(RouterSettings(key_seed=b"k"))
    router.step(0.0, WorkerJoined(A, WorkerSpec(url="u", block_size_tokens=16, ranks=2)))
    metrics = Metrics()
    metrics.bind(lambda: router.status(0.0), lambda: ("A", "late"))
    return metrics, router


@pytest.mark.covers("S40")
def test_gauges_are_read_from_the_router_and_absent_where_nothing_is_known() -> None:
    metrics, router = bound()
    before = samples(metrics)
    assert before['kvrelay_active_requests{worker="A"}'] == 0
    assert 'kvrelay_reported_running_requests{worker="A"}' not in before
    router.step(0.0, LoadReported(A, 0, running_requests=2, kv_usage_ratio=0.5))
    router.step(0.0, LoadReported(A, 1, running_requests=3, kv_usage_ratio=0.25))
    found = samples(metrics)
    assert found['kvrelay_reported_running_requests{worker="A"}'] == 5
    assert found['kvrelay_reported_kv_usage_ratio{worker="A"}'] == 0.375
    assert 'kvrelay_reported_waiting_requests{worker="A"}' not in found


def test_a_worker_that_never_answered_is_down_and_not_missing() -> None:
    found = samples(bound()[0])
    assert (found['kvrelay_worker_up{worker="A"}'], found['kvrelay_worker_up{worker="late"}']) == (1, 0)


def test_a_removed_worker_takes_its_series_along() -> None:
    metrics = Metrics()
    metrics.observe_receipt(receipt())
    metrics.count_events("B", {"stored": 3})
    metrics.count_malformed("B")
    metrics.forget_worker("B")
    assert not [name for name in samples(metrics) if 'worker="B"' in name]


@pytest.mark.covers("RC-18")
def test_receipts_and_metrics_of_one_run_agree() -> None:
    receipts = [receipt(str(number), status=Status.OK if number % 7 else Status.ERROR) for number in range(100)]
    metrics = Metrics()
    for one in receipts:
        metrics.observe_receipt(one)
    totals = totals_of_page(metrics.render().decode())
    assert {comparison.verdict for comparison in compare(receipts, totals)} == {"pass"}
    assert {comparison.verdict for comparison in compare(receipts[:99], totals)} <= {"pass"}
    fewer = {comparison.metric: comparison.verdict for comparison in compare(receipts[:98], totals)}
    assert fewer["kvrelay_requests_total"] == "fail"


@pytest.mark.covers("RC-18")
def test_a_time_window_is_the_difference_of_two_pages_and_a_missing_counter_is_unknown() -> None:
    metrics = Metrics()
    metrics.observe_receipt(receipt("before"))
    before = totals_of_page(metrics.render().decode())
    metrics.observe_receipt(receipt("in"))
    after = totals_of_page(metrics.render().decode())
    assert {comparison.verdict for comparison in compare([receipt("in")], after, before)} == {"pass"}
    del after["kvrelay_claimed_tokens_total"]  # type: ignore[attr-defined]
    verdicts = {comparison.metric: comparison.verdict for comparison in compare([receipt("in")], after, before)}
    assert verdicts["kvrelay_claimed_tokens_total"] == "unknown"


@pytest.mark.covers("OB-02")
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=30))
def test_every_eligible_token_was_hit_or_recomputed_or_is_not_accounted_for(rows: list[tuple[int, int, bool]]) -> None:
    metrics = Metrics()
    for hit, missed, known in rows:
        loss = GateLoss(prefix=0, route=missed // 2, residency=missed - missed // 2, transfer=0)
        metrics.observe_receipt(
            receipt(
                eligible_prefix_tokens=hit + missed,
                actual_cached_tokens=hit if known else None,
                gate_loss_tokens=loss if known else None,
            )
        )
    totals = totals_of_page(metrics.render().decode())
    parts = ("actual_cached_tokens", "recomputed_tokens", "unaccounted_eligible_tokens")
    assert totals["kvrelay_eligible_tokens_total"] == sum(totals.get(f"kvrelay_{part}_total", 0) for part in parts)


@pytest.mark.covers("OB-01")
def test_waiting_is_told_by_histograms_whose_buckets_name_a_request() -> None:
    metrics = Metrics()
    tasks = TaskCounts(TaskLedger(idle_s=10, max_open=10))
    metrics.bind_tasks(tasks, lambda: 1e6)
    one = receipt("r-9")
    tasks.ledger.observe(one)
    metrics.observe_receipt(one)
    metrics.observe_receipt(receipt("x" * 101, ttft_ms=700.0))
    page, content_type = metrics.render_for("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    found = {family.name: family for family in openmetrics_families(page.decode())}
    for name in ("ttft", "itl", "e2e", "session_wall"):
        assert found[f"kvrelay_{name}_seconds"].type == "histogram"
    exemplars = {s.exemplar.labels["request_id"] for s in found["kvrelay_ttft_seconds"].samples if s.exemplar}
    assert exemplars == {"r-9"}, "an id that is too long for the format is left out, and stops nothing"


@pytest.mark.covers("OB-02", "OB-11")
def test_time_to_first_token_is_told_apart_by_cache_and_length_of_the_prompt() -> None:
    metrics = Metrics()
    for cached, prompt in ((800, 1000), (10, 1000), (9000, 20_000), (10_000, 20_000), (None, 20_000)):
        metrics.observe_receipt(receipt(actual_cached_tokens=cached, prompt_tokens=prompt))
    counts = {
        name.partition("{")[2]: value
        for name, value in samples(metrics).items()
        if name.startswith("kvrelay_ttft_by_cache_seconds_count") and value
    }
    assert counts == {
        'cache="warm",prompt="up_to_1k"}': 1,
        'cache="cold",prompt="up_to_1k"}': 1,
        'cache="cold",prompt="over_16k"}': 1,
        'cache="warm",prompt="over_16k"}': 1,
    }


@pytest.mark.covers("OB-03", "OB-04", "OB-05")
def test_reasons_retries_and_fallbacks_are_counted() -> None:
    metrics = Metrics()
    failed = Attempt(1, "A", "1", 0, RouteReason.ROUND_ROBIN, 0.5, Fault.RESET)
    rest = Attempt(2, "B", "1", 0, RouteReason.ROUND_ROBIN, 9.5)
    metrics.observe_receipt(
        receipt(attempts=(failed, rest), fallback_reason=FallbackReason.RETRIED_ELSEWHERE, remote_bytes_read=4096)
    )
    found = samples(metrics)
    assert found['kvrelay_routed_total{reason="cache_spill"}'] == 1
    assert found["kvrelay_retries_total"] == 1
    assert found['kvrelay_fallbacks_total{reason="retried_elsewhere"}'] == 1
    assert found["kvrelay_remote_bytes_read_total"] == 4096
    assert found['kvrelay_stale_claim_tokens_total{worker="B"}'] == 64


@pytest.mark.covers("OB-14")
def test_every_family_on_the_page_is_in_the_table_as_it_is() -> None:
    metrics, _ = bound()
    metrics.bind_tasks(TaskCounts(TaskLedger(idle_s=10, max_open=10)), lambda: 0.0)
    metrics.bind_tokens(lambda: (1, 2))
    metrics.observe_receipt(receipt(unscored_because="no_prompt"))
    for family in metrics.collect():
        spec = METRICS[family.name + ("_total" if family.type == "counter" else "")]
        assert (spec.kind, spec.meaning) == (family.type, family.documentation)
        own = {name for sample in family.samples for name in sample.labels} - {"le"}
        assert own <= set(spec.labels)
