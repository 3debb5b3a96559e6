"""Every item of every checklist: passes on whole evidence, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from kvrelay.core.checklist.dossier import Deployment, Dossier, DrillEvidence, FormatEvidence, ProbeEvidence
from kvrelay.core.checklist.item import Checked, check, overall
from kvrelay.core.checklist.stages import STAGES
from kvrelay.core.doctor.finding import Verdict as Found
from kvrelay.core.gates.judge import Outcome
from kvrelay.core.sizing.breakeven import Link, Prefill
from kvrelay.core.sizing.memory import judge_memory
from kvrelay.core.stats.paired import Call
from tests.core.checklist.dossiers import (
    BLOCKS,
    DOSSIER,
    DRILLS,
    GIB,
    MOCK,
    ONE,
    POLICIES,
    TIERS,
    arm,
    effect,
    finding,
    run,
    verdict,
)

NOTHING = Dossier(deployment=Deployment(sources=("kvrelay.toml",), policy="cache_load"))


def asked(stage: str, code: str, dossier: Dossier) -> Checked:
    return next(one for one in check(STAGES[stage], dossier) if one.code == code)


def change(**members: object) -> Dossier:
    return structs.replace(DOSSIER, **members)


def with_run(old: object, new: object) -> Dossier:
    return change(runs=tuple(new if one is old else one for one in DOSSIER.runs))


def without(*names: str) -> Dossier:
    return change(drills=tuple(drill for drill in DRILLS if drill.drill not in names))


def with_link(latency_s: float, bytes_per_s: float) -> Dossier:
    return change(probes=(ProbeEvidence(tier="valkey", url="valkey://far", link=Link("v", bytes_per_s, latency_s)),))


@pytest.mark.covers("OP-01", "OP-02", "OP-03", "OP-05", "OP-07", "OP-08")
@pytest.mark.parametrize("stage", STAGES)
def test_whole_evidence_passes_every_item_and_each_says_where_it_lies(stage: str) -> None:
    checked = check(STAGES[stage], DOSSIER)

    assert overall(checked) is Outcome.PASS, [(one.code, one.reason) for one in checked if one.verdict != "pass"]
    assert all(one.evidence and one.todo is None for one in checked)


@pytest.mark.covers("OP-01", "OP-02", "OP-03")
@pytest.mark.parametrize(("stage", "items"), [("beginner", 6), ("prelaunch", 4), ("postlaunch", 3), ("redflags", 5)])
def test_no_evidence_is_never_a_pass_for_anything_that_was_to_be_run(stage: str, items: int) -> None:
    checked = check(STAGES[stage], NOTHING)

    assert len(checked) == items
    assert overall(checked) is Outcome.UNKNOWN
    passed = {one.code for one in checked if one.verdict is Outcome.PASS}
    nothing_shared = {"one_at_a_time", "architecture", "near_network", "version_isolation", "mixed_versions",
                      "remote_slower"}  # fmt: skip
    assert passed <= nothing_shared
    assert all(one.todo for one in checked if one.verdict is not Outcome.PASS)


@pytest.mark.covers("OP-01")
@pytest.mark.parametrize(
    ("code", "dossier", "expected", "says"),
    [
        ("mock_then_one_gpu", change(runs=(ONE,)), "unknown", "mock workers: no run"),
        ("mock_then_one_gpu", with_run(MOCK, run("m", arm("a", "sticky", failures=3), label="mock")), "fail",
         "3 of 100"),
        ("mock_then_one_gpu", with_run(ONE, structs.replace(ONE, hardware="cpu")), "unknown", "a GPU has not shown it"),
        ("mock_then_one_gpu", with_run(ONE, run("o", arm("a", "sticky", cached_tokens=0),
                                                label="single_worker_baseline")), "fail", "shares nothing"),
        ("policies_isolated", change(runs=(MOCK,)), "unknown", "no run has round_robin, sticky, cache_load"),
        ("policies_isolated", with_run(POLICIES, structs.replace(POLICIES, problems=("other schedule",))),
         "fail", "other schedule"),
        ("one_at_a_time", with_run(TIERS, run("t", TIERS.arms[0], TIERS.arms[2])), "fail", "cpu and remote at once"),
        ("one_at_a_time", change(runs=(MOCK, POLICIES)), "unknown", "no run adds it alone"),
        ("six_signals", change(runs=(run("r", arm("a", "sticky", queue_known=False, cached_tokens=None)),)), "unknown",
         "cache, queue"),
        ("six_signals", change(runs=(run("r", arm("a", "sticky", added=("remote",))),)), "unknown", "transfer"),
        ("five_drills", without("gap-inner"), "unknown", "event gap: gap-inner has not passed"),
        ("five_drills", change(drills=tuple(structs.replace(one, fleet="simulated") for one in DRILLS)), "unknown",
         "rehearsed on a simulated fleet"),
        ("five_drills", change(drills=(*DRILLS, DrillEvidence("d", "hot-prefix", "attached", "fail", ("p: late",)))),
         "fail", "hot-prefix failed (p: late)"),
        ("gpu_before_clever", with_run(POLICIES, structs.replace(
            POLICIES, verdict=verdict(Outcome.FAIL, "not_promotable"))), "fail", "fail, made up"),
        ("gpu_before_clever", with_run(POLICIES, structs.replace(
            POLICIES, verdict=verdict(Outcome.PASS, "not_promotable"))), "unknown", "pass, made up"),
        ("gpu_before_clever", change(runs=(MOCK,)), "unknown", "no run judges it"),
        ("gpu_before_clever", change(deployment=Deployment(policy="round_robin")), "pass", "the simple one"),
    ],
)  # fmt: skip
def test_beginner(code: str, dossier: Dossier, expected: str, says: str) -> None:
    found = asked("beginner", code, dossier)
    assert (found.verdict.value, says in found.reason) == (expected, True), found.reason


@pytest.mark.covers("OP-02", "OP-05")
@pytest.mark.parametrize(
    ("code", "dossier", "expected", "says"),
    [
        ("architecture", change(runs=()), "unknown", "remote store: no run"),
        ("architecture", change(runs=(run("r", arm("a", "sticky", route_loss_tokens=0)),)), "fail", "under no policy"),
        ("architecture", change(deployment=structs.replace(DOSSIER.deployment, roles=("decode", "prefill"))), "fail",
         "remote store and prefill/decode split at once"),
        ("memory_cap", change(deployment=structs.replace(DOSSIER.deployment, memory=(
            ("max_local_cpu_size",
             judge_memory(host_bytes=128 * GIB, engine_bytes=8 * GIB, asked_bytes=120 * GIB)),))), "fail", "128.8 GB"),
        ("memory_cap", change(findings=(finding("memory", Found.FAIL, "caches may take 127 of 128 GiB"),)), "fail",
         "127 of 128"),
        ("near_network", change(probes=()), "unknown", "no shared tier was measured"),
        ("near_network", with_link(0.030, 2e9), "fail", "another datacentre or region"),
        ("near_network", with_link(0.0003, 1e8), "fail", "fetching never pays at this bandwidth"),
        ("near_network", with_link(0.0095, 1.06e9), "fail", "it pays from"),
        ("near_network", change(rates=()), "unknown", "without a prefill rate"),
        ("near_network", change(rates=(Prefill("slow", 100.0, 9), Prefill("fast", 1e6, 9))), "fail", "never pays"),
        ("near_network", change(probes=(ProbeEvidence(tier="lm", url="lm://x:1", connect_s=0.04),)), "fail", "region"),
        ("near_network", change(probes=(ProbeEvidence(tier="lm", url="lm://x:1", connect_s=0.0004),)), "unknown",
         "bandwidth cannot be measured"),
        ("near_network", change(probes=(ProbeEvidence(tier="lm", url="x", problem="refused"),)), "unknown", "refused"),
        ("near_network", change(probes=(
            ProbeEvidence(tier="s3", url="s3://b", link=Link("s3", 2e9, 0.02), connect_s=0.001),)), "pass",
         "round trip 1.00 ms, a small read 20.00 ms"),
        ("version_isolation", change(contract_blind=("rope_config",)), "fail", "rope_config differ"),
        ("version_isolation", change(drills=()), "unknown", "has passed"),
        ("version_isolation", change(drills=(DrillEvidence("d", "rolling-update", "mock", "fail", ("a hit of v1",)),)),
         "fail", "a hit of v1"),
        ("version_isolation", change(deployment=structs.replace(DOSSIER.deployment, keys_lack_revision="LMCache")),
         "fail", "LMCache"),
    ],
)  # fmt: skip
def test_prelaunch(code: str, dossier: Dossier, expected: str, says: str) -> None:
    found = asked("prelaunch", code, dossier)
    assert (found.verdict.value, says in found.reason) == (expected, True), found.reason


def tiers(call: Call, ratio: float, **changes: object) -> Dossier:
    worse = arm("gpu+cpu", "cache_load", added=("cpu",), ttft_ratio=effect(call, ratio), **changes)
    return change(runs=(run("runs/tiers", TIERS.arms[0], worse),))


@pytest.mark.covers("OP-03")
@pytest.mark.parametrize(
    ("code", "dossier", "expected", "says"),
    [
        ("three_way", tiers(Call.LOWER, 0.8), "pass", "TTFT 0.80 times"),
        ("three_way", tiers(Call.NOT_TOLD_APART, 1.0), "fail", "not surely lower"),
        ("three_way", tiers(Call.TOO_FEW, 0.5), "unknown", "too few"),
        ("three_way", tiers(Call.LOWER, 0.8, cached_tokens=5_000), "fail", "less than 20%"),
        ("three_way", change(findings=(finding("memory", Found.FAIL, "too much"),)), "fail", "too much"),
        ("three_way", structs.replace(tiers(Call.LOWER, 0.8, kv_usage_peak_ratio=None), findings=()), "unknown",
         "nobody says how full"),
        ("cold_start", change(blocks=()), "unknown", "no restart was measured"),
        ("cold_start", change(limits=structs.replace(DOSSIER.limits, cold_ttft_ms=None)), "unknown", "not stated"),
        ("cold_start", change(limits=structs.replace(DOSSIER.limits, cold_ttft_ms=310.0)), "fail", "more than 310 ms"),
        ("hits_without_gain", tiers(Call.HIGHER, 1.4), "fail", "the tier is quick enough: look at the workers' queues"),
        ("hits_without_gain", structs.replace(tiers(Call.HIGHER, 1.4), probes=with_link(0.03, 2e9).probes), "fail",
         "the tier is too slow: valkey: round trip 30.00 ms, a small read"),
        ("hits_without_gain", structs.replace(tiers(Call.HIGHER, 1.4), probes=()), "fail", "has to be measured"),
        ("hits_without_gain", change(runs=(), findings=(finding("remote_slow", Found.WARN, "much hit, yet slow"),)),
         "fail", "much hit, yet slow"),
    ],
)  # fmt: skip
def test_postlaunch(code: str, dossier: Dossier, expected: str, says: str) -> None:
    found = asked("postlaunch", code, dossier)
    assert (found.verdict.value, says in found.reason) == (expected, True), found.reason


WARM_BLOCKS = structs.replace(BLOCKS, blocks=BLOCKS.blocks[1:2])


@pytest.mark.parametrize(
    ("code", "dossier", "expected", "says"),
    [
        pytest.param("only_warm", change(runs=(), blocks=()), "unknown", "no report",
                     marks=pytest.mark.covers("OP-07")),
        pytest.param("only_warm", change(runs=(), blocks=(WARM_BLOCKS,)), "fail", "only warm caches were measured",
                     marks=pytest.mark.covers("OP-07")),
        pytest.param("only_warm", change(runs=(structs.replace(TIERS, cold_start=False),), blocks=()), "fail",
                     "only warm", marks=pytest.mark.covers("OP-07")),
        pytest.param("only_warm", change(runs=(structs.replace(TIERS, cold_start=None),), blocks=(BLOCKS,)), "pass",
                     "as well", marks=pytest.mark.covers("OP-07")),
        pytest.param("unchecked_upgrade", change(findings=(
            finding("engine_version", Found.WARN, "vllm 0.99; tested: 0.32.0", worker="w0"),)), "fail", "w0: vllm 0.99",
            marks=pytest.mark.covers("OP-08")),
        pytest.param("unchecked_upgrade", change(findings=(
            finding("engine_version", Found.OK, worker="w0"), finding("versions_equal", Found.WARN, "w0: 1, w1: 2"))),
            "fail", "w0: 1, w1: 2", marks=pytest.mark.covers("OP-08")),
        pytest.param("unchecked_upgrade", change(formats=(FormatEvidence(
            tier="valkey", looked_at=9, foreign=(("format version 2, this release reads 1", 4),)),)), "fail",
            "4 of format version 2", marks=pytest.mark.covers("OP-08")),
        pytest.param("unchecked_upgrade", change(formats=()), "unknown", "not looked at",
                     marks=pytest.mark.covers("OP-08")),
        pytest.param("unchecked_upgrade", change(findings=()), "unknown", "no worker could be asked",
                     marks=pytest.mark.covers("OP-08")),
        pytest.param("memory_limit", change(deployment=structs.replace(DOSSIER.deployment, memory=(
            ("max_local_cpu_size",
             judge_memory(host_bytes=128 * GIB, engine_bytes=8 * GIB, asked_bytes=120 * GIB)),))), "fail", "128.8 GB",
            marks=pytest.mark.covers("OP-06")),
        pytest.param("memory_limit", change(findings=(finding("memory", Found.FAIL, "caches: 127 of 128 GiB"),)),
                     "fail", "127 of 128", marks=pytest.mark.covers("OP-06")),
        pytest.param("memory_limit", change(findings=(
            finding("memory", Found.OK, "caches may take 64 of 128 GiB"),
            finding("memory_left", Found.FAIL, "4.0 GiB of 128.0 GiB are free"))), "fail", "4.0 GiB of 128.0",
            marks=pytest.mark.covers("OP-06")),
        pytest.param("remote_slower", with_link(0.03, 2e9), "fail", "another datacentre or region",
                     marks=pytest.mark.covers("OP-05")),
    ],
)  # fmt: skip
def test_red_flags(code: str, dossier: Dossier, expected: str, says: str) -> None:
    found = asked("redflags", code, dossier)
    assert (found.verdict.value, says in found.reason) == (expected, True), found.reason


def test_what_has_several_parts_lists_each_with_its_own_verdict() -> None:
    found = asked("beginner", "five_drills", without("worker-loss"))
    assert found.parts[0] == "unknown: worker loss: worker-loss has not passed"
    assert found.parts[1] == "pass: hot-prefix skew: passed on staging"


ITEMS: list[Callable[[Dossier], object]] = [item.judge for own in STAGES.values() for item in own]


@pytest.mark.parametrize("judge", ITEMS)
def test_no_item_minds_what_else_is_missing(judge: Callable[[Dossier], object]) -> None:
    for member in ("runs", "blocks", "drills", "probes", "rates", "formats", "findings"):
        judge(change(**{member: ()}))
