"""Runs that never happened, ruled on: what may pass, what never does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.lab.made_up_run import made_up_measured

from kvrelay.core.gates.evidence import Registration
from kvrelay.core.gates.gate_file import parse_gates
from kvrelay.core.gates.judge import Outcome, Verdict
from kvrelay.core.stats.paired import Call
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.recount import recount
from kvrelay.lab.arms.results import ArmData, policy_results
from kvrelay.lab.arms.ruling import rule_on
from kvrelay.lab.arms.sameness import CONFIG

GATES = parse_gates(
    b"""
title = "made up"
candidate = "cache_load"
baseline = "round_robin"
baseline_run = "this-run"

[[gate]]
name = "p95 TTFT falls"
metric = "ttft_p95_ms"
at_most_ratio = 0.9

[[gate]]
name = "no turn waits longer"
paired = "ttft_ms"
over = "no_bucket_worse"
at_most_ratio = 1.0
"""
)
MEASURED = made_up_measured(gates=GATES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The arms' configurations, which differ in the policy."""
    for facts in MEASURED.manifest.observed:
        own = tmp_path / "arms" / facts.arm
        own.mkdir(parents=True)
        (own / CONFIG).write_text(f'[gateway]\nport = 0\npolicy = "{facts.policy}"\n')
    return tmp_path


def verdict(measured: Measured, folder: Path) -> Verdict:
    found = rule_on(measured, folder, Registration.REGISTERED).verdict
    assert found is not None
    return found


def with_arms(change: dict[str, ArmData]) -> Measured:
    arms = tuple(change.get(data.arm.name, data) for data in MEASURED.arms)
    return msgspec.structs.replace(MEASURED, arms=arms, results=policy_results(arms, MEASURED.rows))


def refuse_every_seventh(data: ArmData) -> ArmData:
    """Of an arm whose other answers all come at once."""
    samples = [
        msgspec.structs.replace(sample, failure="HTTP 503", http_status=503, ttft_ms=None, ttft_sent_ms=None,
                                first_token_ms=None, itl_ms=(), cached_tokens=None)
        if number % 7 == 6
        else msgspec.structs.replace(sample, ttft_ms=1.0, ttft_sent_ms=1.0, ended_ms=sample.due_ms + 2.0)
        for number, sample in enumerate(data.samples)
    ]  # fmt: skip
    return msgspec.structs.replace(data, samples=tuple(samples))


@pytest.mark.covers("GT-06", "BM-27", "BM-24")
def test_a_better_policy_passes_with_pairs_in_every_bucket(folder: Path) -> None:
    ruling = rule_on(MEASURED, folder, Registration.REGISTERED)

    assert ruling.verdict is not None and ruling.verdict.verdict is Outcome.PASS, ruling.verdict
    assert ruling.verdict.promotion == "not_promotable"
    compared = ruling.comparisons["cache_load"].compared
    assert len(compared.metrics["ttft_ms"].buckets) == 6 and len(compared.failures) == 6
    calls = [effect.call for effect in compared.metrics["ttft_ms"].buckets.values()]
    assert calls[2:] == [Call.LOWER] * 4 and Call.HIGHER not in calls  # where there is much to reuse, it wins
    assert ruling.sameness.problems == ()


@pytest.mark.covers("GT-03", "GT-04", "GT-10")
def test_a_clever_arm_that_refuses_one_in_seven_never_passes_however_fast_the_others_are(folder: Path) -> None:
    broken = {data.arm.name: refuse_every_seventh(data) for data in MEASURED.arms if data.arm.policy == "cache_load"}
    measured = with_arms(broken)
    found = verdict(measured, folder)

    assert found.verdict is Outcome.FAIL
    failed = [gate.name for gate in found.gates if gate.outcome is Outcome.FAIL]
    assert failed[:2] == ["no more failures than the baseline", "no fewer tasks succeed than under the baseline"]
    assert "p95 TTFT falls" in failed  # a refused request never got its first token
    assert measured.results["cache_load"].ttft_ms.p95 == 1.0  # though those that were answered look splendid


@pytest.mark.covers("GT-10")
@pytest.mark.parametrize("deleted", ["samples", "receipts", "both", "arm"])
def test_a_deleted_failure_is_found_and_counts_as_one(folder: Path, deleted: str) -> None:
    broken = {data.arm.name: refuse_every_seventh(data) for data in MEASURED.arms if data.arm.policy == "cache_load"}
    for name, data in broken.items():
        good = tuple(sample for sample in data.samples if sample.ok)
        kept = {sample.request_id: data.receipts[sample.request_id] for sample in good}
        broken[name] = msgspec.structs.replace(
            data,
            samples=data.samples if deleted == "receipts" else good,
            receipts=kept if deleted != "samples" else data.receipts,
        )
    measured = with_arms(broken)
    if deleted == "arm":
        arms = tuple(data for data in measured.arms if data.arm.name != "cache_load-1")
        measured = msgspec.structs.replace(measured, arms=arms, results=policy_results(arms, measured.rows))
    found = verdict(measured, folder)

    assert recount(measured.manifest, measured.rows, measured.arms)
    assert found.verdict is Outcome.FAIL and found.evidence == "insufficient"
    assert measured.results["cache_load"].failures > 0


@pytest.mark.covers("GT-10")
def test_a_plan_that_was_shortened_to_fit_is_found(folder: Path) -> None:
    assert recount(MEASURED.manifest, MEASURED.rows, MEASURED.arms) == ()

    shortened = recount(MEASURED.manifest, MEASURED.rows[:-1], MEASURED.arms)
    assert shortened[0] == "the planned turns in the folder are not those of the manifest"


@pytest.mark.covers("BM-25", "BM-18", "BM-19")
def test_arms_that_differ_in_more_than_the_policy_prove_nothing(folder: Path) -> None:
    (folder / "arms" / "cache_load-1" / CONFIG).write_text('[gateway]\npolicy = "cache_load"\n[retry]\nattempts = 9\n')
    found = verdict(MEASURED, folder)
    assert found.verdict is Outcome.UNKNOWN
    assert "cache_load-1 differs from round_robin-0 in 2 factors: retry, router" in found.reasons[0]

    first, second, *rest = MEASURED.manifest.observed
    other = msgspec.structs.replace(second, schedule_sha256="another")
    manifest = msgspec.structs.replace(MEASURED.manifest, observed=(first, other, *rest))
    found = verdict(msgspec.structs.replace(MEASURED, manifest=manifest), folder)
    assert any("sent another schedule" in reason for reason in found.reasons)


@pytest.mark.covers("BM-33")
def test_hits_times_transfer_context_and_isolation_stand_in_one_place(folder: Path) -> None:
    figures = rule_on(MEASURED, folder, Registration.REGISTERED).figures["cache_load"]

    assert figures["hit_ratio"].value is not None and figures["ttft_p95_ms"].value is not None
    assert figures["wrong_context_requests"].value == 0.0
    assert all(value.value is not None or value.reason for value in figures.values())
