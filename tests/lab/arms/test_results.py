from __future__ import annotations

import msgspec
import pytest
from tests.lab.made_up_run import made_up_run

from kvrelay.core.gates.evidence import MIN_REPEATS
from kvrelay.core.receipts.receipt import GateLoss
from kvrelay.core.stats.distribution import distribution
from kvrelay.lab.arms import manifest
from kvrelay.lab.arms.order import rotated_order
from kvrelay.lab.arms.ranking import rank
from kvrelay.lab.arms.results import ArmData, PolicyResult, busy_ms, policy_results
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.report.files import summary
from kvrelay.lab.report.story import telling_receipt

RUN = made_up_run()
MEASURED = RUN.measured


@pytest.mark.covers("BM-22")
def test_order_is_a_latin_square() -> None:
    order = rotated_order(("a", "b", "c"), 3)

    assert [arm.name for arm in order] == ["a-0", "b-0", "c-0", "b-1", "c-1", "a-1", "c-2", "a-2", "b-2"]
    for position in range(3):
        assert {order[repeat * 3 + position].policy for repeat in range(3)} == {"a", "b", "c"}


@pytest.mark.covers("RT-01")
def test_hits_and_gate_losses_add_up_to_the_eligible_tokens() -> None:
    for result in MEASURED.results.values():
        assert result.unreconciled_requests == 0
        assert (result.actual_cached_tokens or 0) + result.gate_loss_tokens.total == result.eligible_tokens


def test_pooled_figures_are_the_sum_of_the_repeats() -> None:
    for result in MEASURED.results.values():
        assert len(result.repeats) == 3
        for name in ("requests", "failures", "eligible_tokens", "claimed_tokens", "actual_cached_tokens"):
            assert getattr(result, name) == sum(getattr(repeat, name) for repeat in result.repeats), name
        assert result.ttft_ms.count == sum(repeat.ttft_ms.count for repeat in result.repeats)
        mean = sum(repeat.max_over_mean_load or 0 for repeat in result.repeats) / 3
        assert result.max_over_mean_load == pytest.approx(mean, abs=1e-3)


def broken_arm() -> ArmData:
    """The first arm with one request that failed, one without usage, and one receipt that does not add up."""
    data = MEASURED.arms[0]
    samples, receipts = list(data.samples), dict(data.receipts)
    samples[0] = msgspec.structs.replace(samples[0], failure="HTTP 502", ttft_ms=None, ttft_sent_ms=None)
    del receipts[samples[0].request_id]
    silent, wrong = samples[1].request_id, samples[2].request_id
    receipts[silent] = msgspec.structs.replace(receipts[silent], actual_cached_tokens=None)
    receipts[wrong] = msgspec.structs.replace(receipts[wrong], gate_loss_tokens=GateLoss(1, 0, 0, 0))
    return msgspec.structs.replace(data, samples=tuple(samples), receipts=receipts)


def test_failures_stay_and_unknown_hits_are_not_zero() -> None:
    result = policy_results([broken_arm()], MEASURED.rows)[MEASURED.arms[0].arm.policy]

    assert (result.requests, result.failures) == (len(MEASURED.arms[0].samples), 1)
    assert result.ttft_ms.count == result.requests - 1
    assert result.requests_without_usage == 2
    assert result.unreconciled_requests == 1


def test_load_counts_idle_workers() -> None:
    data = MEASURED.arms[0]
    lonely = ArmData(
        Arm("x", 0), ("mock-0", "idle"), tuple(s for s in data.samples if s.worker == "mock-0"), {}, {}, 1.0
    )

    assert busy_ms(lonely)["idle"] == 0.0
    result = policy_results([lonely], MEASURED.rows)["x"]
    assert result.max_over_mean_load == 2.0
    assert result.actual_cached_tokens is None


def test_verdict_follows_its_rule_and_names_thin_evidence() -> None:
    verdict = rank(MEASURED.results, label="mock")
    assert (verdict.winner, verdict.evidence) == ("cache_load", "sufficient")
    assert "cache_load won" in verdict.won and "sticky" in verdict.won

    failed = {**MEASURED.results, "cache_load": msgspec.structs.replace(MEASURED.results["cache_load"], failures=1)}
    assert rank(failed, label="mock").winner == "sticky"
    thin = rank(made_up_run(settings=RunSettings(repeats=MIN_REPEATS - 1)).measured.results, label="mock")
    assert thin.evidence == "insufficient" and "tendency" in thin.why
    winner = MEASURED.results["cache_load"]
    late = msgspec.structs.replace(winner, send_lag_ms=distribution([60.0]))
    unsure = rank({**MEASURED.results, "cache_load": late}, label="mock")
    assert unsure.evidence == "insufficient"
    assert unsure.why.endswith("This is a tendency, not evidence: our own client sent late under cache_load.")
    few = msgspec.structs.replace(winner, ttft_ms=msgspec.structs.replace(winner.ttft_ms, count=19))
    assert rank({**MEASURED.results, "cache_load": few}, label="mock").why.endswith(
        "a policy had fewer than 20 answered requests."
    )
    unharmed = msgspec.structs.replace(MEASURED.results["sticky"], gate_loss_tokens=GateLoss(9, 0, 0, 0))
    assert "with no token lost that was held" in rank({**MEASURED.results, "sticky": unharmed}, label="mock").why
    alone = rank({"sticky": MEASURED.results["sticky"]}, label="mock")
    assert (alone.winner, alone.evidence) == (None, "none")


def test_nobody_wins_by_a_hair() -> None:
    best = MEASURED.results["cache_load"]
    assert best.ttft_ms.p95 is not None

    def rival(ratio: float) -> PolicyResult:
        ttft_ms = msgspec.structs.replace(best.ttft_ms, p95=best.ttft_ms.p95 * ratio)
        return msgspec.structs.replace(MEASURED.results["sticky"], ttft_ms=ttft_ms)

    tie = rank({"cache_load": best, "sticky": rival(1.049)}, label="mock")
    assert (tie.winner, tie.evidence) == (None, "sufficient") and tie.won.startswith("Nobody won")
    assert rank({"cache_load": best, "sticky": rival(1.051)}, label="mock").winner == "cache_load"


def test_summary_has_the_published_names() -> None:
    published = summary(RUN)

    assert published["label"] == "mock"
    assert set(published["policies"]) == {"round_robin", "sticky", "cache_load"}
    for figures in published["policies"].values():
        assert {"p50", "p95", "p99", "count"} <= set(figures["ttft_ms"])
        assert {"p50", "p95", "count"} <= set(figures["session_wall_ms"])
        assert {
            "requests", "failures", "itl_ms", "actual_cached_tokens", "claimed_tokens", "eligible_tokens",
            "recomputed_tokens", "max_over_mean_load", "gate_loss_tokens",
        } <= set(figures)  # fmt: skip
    assert published["manifest"]["stated"]["order"][0] == "round_robin-0"


def test_manifest_digest_covers_what_was_stated_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_commit", lambda: "somebody else may commit between two of these")
    first, same, other = made_up_run(), made_up_run(seed=9), made_up_run(settings=RunSettings(seed=2))

    digests = [run.measured.manifest.digest for run in (first, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert {receipt.manifest_digest for receipt in MEASURED.receipts()} == {MEASURED.manifest.digest}


def test_telling_receipt_is_the_cache_aware_policys_biggest_hit() -> None:
    receipt = telling_receipt(MEASURED)

    assert receipt is not None and receipt.policy == "cache_load"
    assert receipt.actual_cached_tokens == max(
        one.actual_cached_tokens or 0 for one in MEASURED.receipts() if one.policy == "cache_load"
    )


def test_a_hit_on_a_busier_worker_tells_more_than_a_bigger_one_on_the_least_busy() -> None:
    arm = next(data for data in MEASURED.arms if data.arm.policy == "cache_load")
    small = min((one for one in arm.receipts.values() if one.actual_cached_tokens), key=lambda one: one.arrived_ms or 0)
    chosen = msgspec.structs.replace(small.candidates[0], load={"active_prefill_tokens": 900.0})
    idle = msgspec.structs.replace(chosen, worker="idle", load={})
    against_load = msgspec.structs.replace(small, candidates=(chosen, idle))
    changed = msgspec.structs.replace(arm, receipts={**arm.receipts, small.request_id: against_load})
    arms = tuple(changed if data is arm else data for data in MEASURED.arms)

    receipt = telling_receipt(msgspec.structs.replace(MEASURED, arms=arms))
    assert receipt is not None and receipt.request_id == small.request_id
