from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from tests.core.gates.test_gate_file import HEAD

from kvrelay.core.gates.evidence import Evidence, Hardware, Layer, Registration, hardware_of, layer_of
from kvrelay.core.gates.gate_file import parse_gates
from kvrelay.core.gates.judge import Compared, Outcome, Value, Verdict, judge
from kvrelay.core.gates.lock import GateLock, LockUnreadable, parse_lock, registration
from kvrelay.core.gates.metrics import FINAL_JUDGES
from kvrelay.core.stats.paired import Pair, compare

GPU = Evidence(
    layer=Layer.FLEET, hardware=Hardware.GPU, registration=Registration.REGISTERED, repeats=3, answered_requests=300
)
SIMPLE = {
    "ttft_p95_ms": 500.0, "session_wall_p50_ms": 9000.0, "successful_tasks_per_s": 2.0, "task_success_ratio": 1.0,
    "failed_requests": 0.0, "failed_ratio": 0.0, "retries_ratio": 0.0, "hit_ratio": 0.3, "hits_disagree_ratio": 0.0,
    "kv_usage_peak_ratio": 0.8,
}  # fmt: skip
CLEVER = {
    **SIMPLE,
    "ttft_p95_ms": 250.0,
    "session_wall_p50_ms": 6000.0,
    "successful_tasks_per_s": 2.5,
    "hit_ratio": 0.8,
}


def figures(candidate: dict[str, float], baseline: dict[str, float] = SIMPLE) -> dict[str, dict[str, Value]]:
    arms = {"cache_load": candidate, "round_robin": baseline}
    return {arm: {name: Value(value, 300) for name, value in own.items()} for arm, own in arms.items()}


def compared(*ratios: float) -> Compared:
    pairs = [
        Pair(repeat, f"s{session}", f"bucket {bucket}", 100.0, 100.0 * ratio * (1 + session / 1000))
        for bucket, ratio in enumerate(ratios)
        for repeat in range(3)
        for session in range(8)
    ]
    return Compared({"ttft_ms": compare(pairs, np.random.default_rng(1))}, {"bucket 0": (1, 1)})


def judged(
    gates: str,
    candidate: dict[str, float] = CLEVER,
    pairs: Compared = Compared(),
    evidence: Evidence = GPU,
    baseline: dict[str, float] = SIMPLE,
) -> Verdict:
    file = parse_gates(f"{HEAD}\n[[gate]]\nname = 'g'\n{gates}\n".encode())
    return judge(file, figures(candidate, baseline), pairs, evidence)


SLO = 'metric = "ttft_p95_ms"\nat_most = 600'


@pytest.mark.covers("GT-02", "GT-06")
def test_every_gate_kept_is_a_pass_and_has_the_three_final_judges() -> None:
    verdict = judged(SLO, pairs=compared(0.5))

    assert (verdict.verdict, verdict.exit_status, verdict.promotion) == (Outcome.PASS, 0, "promotable")
    assert [one.metric for one in verdict.final_judges] == list(FINAL_JUDGES)
    assert [one.ratio for one in verdict.final_judges] == pytest.approx([0.5, 2 / 3, 1.25])
    assert verdict.final_judges[0].effect is not None and verdict.final_judges[0].effect.ratio == pytest.approx(
        0.5, rel=0.01
    )


@pytest.mark.covers("GT-02")
def test_a_broken_slo_is_a_fail_with_its_reason() -> None:
    verdict = judged('metric = "ttft_p95_ms"\nat_most = 200')

    assert (verdict.verdict, verdict.exit_status) == (Outcome.FAIL, 1)
    assert verdict.reasons == ("g: ttft_p95_ms of cache_load is 250 (300 values), at most 200",)


@pytest.mark.covers("GT-03", "GT-04")
@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({"task_success_ratio": 0.99}, "no fewer tasks succeed than under the baseline"),
        ({"failed_ratio": 0.001}, "no more failures than the baseline"),
    ],
)
def test_success_and_failures_are_judged_though_nobody_asked(changed: dict[str, float], failed: str) -> None:
    verdict = judged(SLO, {**CLEVER, **changed})

    assert verdict.verdict is Outcome.FAIL
    assert [one.name for one in verdict.gates if one.outcome is Outcome.FAIL] == [failed]


@pytest.mark.covers("GT-04")
def test_a_budget_of_retries() -> None:
    budget = 'metric = "retries_ratio"\nat_most = 0.01'

    assert judged(budget, {**CLEVER, "retries_ratio": 0.01}).verdict is Outcome.PASS
    assert judged(budget, {**CLEVER, "retries_ratio": 0.02}).verdict is Outcome.FAIL


def test_a_percentile_among_unanswered_requests_fails_any_limit() -> None:
    verdict = judged(SLO, {**CLEVER, "ttft_p95_ms": math.inf})

    assert verdict.verdict is Outcome.FAIL
    assert "never answered" in verdict.reasons[0]
    assert verdict.final_judges[0].candidate is None and verdict.final_judges[0].never_answered


@pytest.mark.covers("GT-09")
@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({}, Outcome.PASS),
        ({"ttft_p95_ms": 480.0}, Outcome.FAIL),
        ({"hits_disagree_ratio": 0.2}, Outcome.FAIL),
        ({"kv_usage_peak_ratio": 0.99}, Outcome.FAIL),
    ],
)
def test_faster_and_real_hits_and_safe_memory_hold_together_or_not_at_all(
    changed: dict[str, float], outcome: Outcome
) -> None:
    three = """all = [
      { metric = "ttft_p95_ms", at_most_ratio = 0.9 },
      { metric = "hits_disagree_ratio", at_most = 0.01 },
      { metric = "kv_usage_peak_ratio", at_most = 0.95 },
    ]"""

    assert judged(three, {**CLEVER, **changed}).verdict is outcome
    unknown = {name: value for name, value in CLEVER.items() if name != "kv_usage_peak_ratio"}
    assert judged(three, unknown).verdict is Outcome.UNKNOWN
    assert judged(three, {**unknown, "ttft_p95_ms": 480.0}).verdict is Outcome.FAIL


@pytest.mark.covers("GT-05", "BM-27")
@pytest.mark.parametrize(
    ("ratios", "failures", "outcome"),
    [
        ((0.8, 0.9), {"a": (2, 1)}, Outcome.PASS),
        ((0.8, 1.1), {"a": (2, 1)}, Outcome.FAIL),
        ((0.8, 0.9965), {"a": (2, 1)}, Outcome.UNKNOWN),
        ((0.8, 0.9), {"a": (0, 0), "b": (1, 2)}, Outcome.FAIL),
        ((0.8, 0.9), {}, Outcome.UNKNOWN),
    ],
)
def test_a_remote_tier_stays_only_if_it_wins_in_every_bucket_and_is_as_reliable(
    ratios: tuple[float, ...], failures: dict[str, tuple[int, int]], outcome: Outcome
) -> None:
    both = """all = [
      { paired = "ttft_ms", over = "every_bucket", at_most_ratio = 1.0 },
      { paired = "failures", at_most_ratio = 1.0 },
    ]"""
    pairs = msgspec.structs.replace(compared(*ratios), failures=failures)

    assert judged(both, pairs=pairs).verdict is outcome


def test_no_bucket_worse_and_all_pairs_together() -> None:
    assert judged('paired = "ttft_ms"\nover = "no_bucket_worse"\nat_most_ratio = 1', pairs=compared(0.5, 1.0)).verdict
    worse = judged('paired = "ttft_ms"\nover = "no_bucket_worse"\nat_most_ratio = 1', pairs=compared(0.5, 1.2))
    assert worse.reasons == ("g: slower than the baseline: bucket 1",)
    overall = judged('paired = "ttft_ms"\nat_most_ratio = 1', pairs=compared(0.5, 1.2))
    assert overall.verdict is Outcome.PASS
    assert judged('paired = "session_wall_ms"\nat_most_ratio = 1', pairs=compared(0.5)).verdict is Outcome.UNKNOWN


@pytest.mark.covers("GT-08", "BM-31", "BM-07")
@pytest.mark.parametrize(
    ("layer", "hardware", "label", "promotion"),
    [
        (Layer.FLEET, Hardware.GPU, "routing_result", "promotable"),
        (Layer.FLEET, Hardware.CPU, "routing_result", "not_promotable"),
        (Layer.FLEET, Hardware.UNKNOWN, "routing_result", "not_promotable"),
        (Layer.ONE_WORKER, Hardware.GPU, "single_worker_baseline", "not_promotable"),
        (Layer.MOCK, Hardware.MOCK, "mock", "not_promotable"),
        (Layer.MOCK, Hardware.GPU, "mock", "not_promotable"),
    ],
)
def test_only_a_fleet_of_gpus_promotes(layer: Layer, hardware: Hardware, label: str, promotion: str) -> None:
    verdict = judged(SLO, evidence=msgspec.structs.replace(GPU, layer=layer, hardware=hardware))

    assert (verdict.verdict, verdict.label, verdict.promotion) == (Outcome.PASS, label, promotion)


@pytest.mark.covers("BM-07")
def test_layers_and_hardware_follow_from_the_workers() -> None:
    assert layer_of(mock=True, workers=4) is Layer.MOCK
    assert layer_of(mock=False, workers=1) is Layer.ONE_WORKER
    assert layer_of(mock=False, workers=2) is Layer.FLEET
    assert hardware_of([Hardware.GPU, Hardware.MOCK, Hardware.CPU]) is Hardware.MOCK
    assert hardware_of([Hardware.GPU, Hardware.UNKNOWN]) is Hardware.UNKNOWN
    assert hardware_of([Hardware.GPU, Hardware.CPU]) is Hardware.CPU
    assert hardware_of([]) is Hardware.UNKNOWN


@pytest.mark.covers("GT-01", "GT-10", "BM-22")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"repeats": 2}, "insufficient evidence: 2 of at least 3 repeats"),
        ({"answered_requests": 19}, "insufficient evidence: an arm has 19 answered requests, fewer than 20"),
        ({"contaminated_arms": ("a-1",)}, "insufficient evidence: a-1 did not start with empty caches"),
        ({"registration": Registration.UNLOCKED}, "not pre-registered: the gates are unlocked"),
        ({"registration": Registration.CHANGED}, "not pre-registered: the gates are changed"),
        ({"registration": Registration.LATE}, "not pre-registered: the gates are locked too late"),
        ({"unanswered_records": ("3 requests of a-1 left no record",)}, None),
    ],
)
def test_what_proves_nothing_never_passes_and_a_fail_stays_one(changed: dict[str, object], reason: str | None) -> None:
    evidence = msgspec.structs.replace(GPU, **changed)
    verdict = judged(SLO, evidence=evidence)

    assert (verdict.verdict, verdict.exit_status, verdict.promotion) == (Outcome.UNKNOWN, 3, "not_promotable")
    assert reason is None or verdict.reasons == (reason,)
    assert judged(SLO, {**CLEVER, "ttft_p95_ms": 700.0}, evidence=evidence).verdict is Outcome.FAIL


@pytest.mark.covers("GT-01")
def test_a_lock_counts_only_for_the_same_bytes_and_before_the_first_request() -> None:
    lock = parse_lock(b'{"sha256": "aa", "locked_at_s": 100.0, "locked_at": "then", "kvrelay": "0.1.0"}')

    assert registration("aa", lock, first_request_s=101.0) is Registration.REGISTERED
    assert registration("ab", lock, first_request_s=101.0) is Registration.CHANGED
    assert registration("aa", lock, first_request_s=99.0) is Registration.LATE
    assert registration("aa", None, first_request_s=101.0) is Registration.UNLOCKED
    assert lock == GateLock("aa", 100.0, "then", "0.1.0")
    with pytest.raises(LockUnreadable):
        parse_lock(b"{}")


def test_ratios_of_zeros() -> None:
    same = 'metric = "failed_requests"\nat_most_ratio = 1'

    assert judged(same).verdict is Outcome.PASS
    assert judged(same, {**CLEVER, "failed_requests": 1.0}).verdict is Outcome.FAIL
    never = {**SIMPLE, "ttft_p95_ms": math.inf}
    both = judged('metric = "ttft_p95_ms"\nat_most_ratio = 1', never, baseline=never)
    assert both.verdict is Outcome.UNKNOWN
    stranger = judged('metric = "hit_ratio"\nat_least_ratio = 1\nrelative_to = "sticky"')
    assert stranger.reasons == ("g: there is no arm `sticky` in this run",)
