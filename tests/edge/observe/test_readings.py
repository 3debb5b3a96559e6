"""Pages as numbers: sums, increases over resets, quantiles as Prometheus has them, and what is absent stays absent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.doctor.facts import Facts
from kvrelay.core.doctor.finding import examine
from kvrelay.core.doctor.window_rules import WINDOW_RULES
from kvrelay.core.model.units import Status
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.observe.readings import Readings, Span, quantile, read_page
from kvrelay.edge.observe.runbook import told
from kvrelay.edge.observe.windows import four_numbers, window
from tests.edge.observe.samples import receipt


def reading(metrics: Metrics, at_s: float) -> Readings:
    return Readings(metrics.collect(), at_s)


@pytest.mark.covers("S40")
def test_an_increase_is_never_negative_and_what_is_absent_is_none() -> None:
    text = '# TYPE a counter\na_total{{worker="x"}} {}\na_total{{worker="y"}} 1\n'
    before, after = read_page(text.format(7), 0.0), read_page(text.format(3), 10.0)
    span = Span(before, after)
    assert span.increase_by("a_total", "worker") == {"x": 3, "y": 0}
    assert span.increase("a_total", worker="x") == 3, "after a reset the new total is all that was added"
    assert (span.increase("b_total"), span.rate("b_total"), after.total("b_total")) == (None, None, None)
    assert Span(None, after).increase("a_total") == 4
    assert Span(None, after).rate("a_total") is None, "a rate needs two readings"


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_stands_for(values: list[float], q: float) -> None:
    limits = [0.01, 0.1, 1.0, 10.0, float("inf")]
    found = quantile({limit: sum(value <= limit for value in values) for limit in limits}, q)
    wanted = sorted(values)[max(0, -(-int(q * len(values) * 1000) // 1000) - 1)]
    low = max((limit for limit in [0.0, *limits] if limit < wanted), default=0.0)
    high = min(limit for limit in limits if limit >= wanted)
    assert found is not None
    assert low <= found <= (low if high == float("inf") else high) + 1e-9


@pytest.mark.covers("OB-12")
def test_four_numbers_of_one_stretch_and_unavailable_ones_are_said_to_be() -> None:
    metrics = Metrics()
    before = reading(metrics, 100.0)
    for number in range(40):
        metrics.observe_receipt(receipt(str(number)))
    numbers = four_numbers(Span(before, reading(metrics, 110.0)))
    assert (numbers.ttft_count, numbers.requests_per_s, numbers.completion_tokens_per_s) == (40, 4.0, 16.0)
    assert numbers.hit_ratio == 1216 / 1600
    assert told(numbers) == (
        "TTFT: p50 38 ms, p95 49 ms (40 requests)",
        "hit rate: 76.0% of what could be hit",
        "throughput: 4.0 requests/s, 16.0 tokens/s",
        "memory: unavailable",
    )


@pytest.mark.covers("OB-11", "RC-18")
def test_the_rules_see_in_a_page_what_its_receipts_said() -> None:
    metrics = Metrics()
    for number in range(30):
        metrics.observe_receipt(receipt(f"warm{number}", ttft_ms=390.0))
        metrics.observe_receipt(
            receipt(
                f"cold{number}", ttft_ms=400.0, actual_cached_tokens=0, eligible_prefix_tokens=0, gate_loss_tokens=None
            )
        )
    metrics.observe_receipt(
        receipt("lost", status=Status.WORKER_LOST, actual_cached_tokens=None, gate_loss_tokens=None)
    )
    seen = window(Span(None, reading(metrics, 0.0)), now_s=0.0)
    assert (seen.requests, seen.failed) == (61, 1)
    assert (seen.eligible_tokens, seen.hit_tokens) == (30 * 1600, 30 * 1216)
    found = {one.code: one for one in examine(Facts(policy="p", workers=(), window=seen), WINDOW_RULES)}
    assert found["remote_slow"].verdict == "warn"
    assert "76% of what could be hit was, yet prompts of up to 4k tokens" in found["remote_slow"].detail
