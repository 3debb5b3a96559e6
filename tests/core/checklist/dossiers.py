"""Made-up evidence in which everything was shown; tests take away or spoil one thing at a time."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from kvrelay.core.checklist.dossier import (
    ArmEvidence,
    BlockEvidence,
    BlocksEvidence,
    Deployment,
    Dossier,
    DrillEvidence,
    FormatEvidence,
    Limits,
    ProbeEvidence,
    RunEvidence,
    TierEvidence,
)
from kvrelay.core.doctor.finding import Finding
from kvrelay.core.doctor.finding import Verdict as Found
from kvrelay.core.gates.judge import Outcome, Verdict
from kvrelay.core.sizing.breakeven import Link, Prefill
from kvrelay.core.sizing.memory import judge_memory
from kvrelay.core.stats.bootstrap import Interval
from kvrelay.core.stats.paired import Call, PairedEffect

GIB = 2**30


def arm(name: str, policy: str, **changes: Any) -> ArmEvidence:
    made = ArmEvidence(
        name=name, policy=policy, requests=100, failures=0, tasks_planned=20, tasks_successful=20, ttft_p50_ms=40.0,
        ttft_p95_ms=90.0, ttft_count=100, eligible_tokens=100_000, cached_tokens=60_000, route_loss_tokens=20_000,
        queue_known=True, transferred_bytes=None, kv_usage_peak_ratio=0.8,
    )  # fmt: skip
    return structs.replace(made, **changes)


def effect(call: Call, ratio: float) -> PairedEffect:
    return PairedEffect(100, 20, ratio, Interval(ratio - 0.05, ratio + 0.05, 0.95), (ratio,) * 3, call)


def verdict(outcome: Outcome, promotion: str, candidate: str = "cache_load") -> Verdict:
    return Verdict(
        verdict=outcome, candidate=candidate, baseline="round_robin", baseline_run="this-run",
        registration="registered", evidence="sufficient", label="routing_result", layer="C", hardware="gpu",
        promotion=promotion, promotion_reason="made up", final_judges=(), gates=(), reasons=(),
    )  # fmt: skip


def run(source: str, *arms: ArmEvidence, **changes: Any) -> RunEvidence:
    made = RunEvidence(
        source=source, digest="d" * 64, trace_sha256="t", label="routing_result", hardware="gpu",
        baseline=arms[0].name, repeats=3, arms=arms, cold_start=True,
    )  # fmt: skip
    return structs.replace(made, **changes)


POLICIES = run(
    "runs/policies",
    *(arm(name, name) for name in ("round_robin", "sticky", "cache_load")),
    verdict=verdict(Outcome.PASS, "promotable"),
)
MOCK = run("runs/mock", arm("cache_load", "cache_load"), label="mock", hardware="mock")
ONE = run("runs/one", arm("round_robin", "round_robin"), label="single_worker_baseline")
TIERS = run(
    "runs/tiers",
    arm("gpu", "cache_load"),
    arm("gpu+cpu", "cache_load", added=("cpu",), ttft_ratio=effect(Call.LOWER, 0.8), transferred_bytes=0),
    arm("gpu+cpu+remote", "cache_load", added=("cpu", "remote"), ttft_ratio=effect(Call.LOWER, 0.7),
        transferred_bytes=10**9),
)  # fmt: skip
DRILLS = tuple(
    DrillEvidence(f"drills/{name}.json", name, "attached", "pass")
    for name in (
        "worker-loss", "hot-prefix", "gap-inner", "store-outage", "stale-session", "rotation-revision",
        "rolling-update", "store-revisions",
    )
)  # fmt: skip
BLOCKS = BlocksEvidence(
    "runs/blocks.json",
    "t",
    "cold_warm_restart",
    tuple(
        BlockEvidence("cache_load", f"{name}-1", before, 12, 0, p95 / 2, p95, share)
        for name, before, p95, share in (
            ("cold", "reset", 300.0, 0.0),
            ("warm", "nothing", 60.0, 0.9),
            ("restart", "restart", 320.0, 0.0),
        )
    ),
)


def finding(code: str, verdict: Found, detail: str = "made up", worker: str | None = None) -> Finding:
    return Finding(code=code, worker=worker, setting="x", verdict=verdict, detail=detail)


DOSSIER = Dossier(
    runs=(MOCK, ONE, POLICIES, TIERS),
    blocks=(BLOCKS,),
    drills=DRILLS,
    deployment=Deployment(
        sources=("kvrelay.toml",),
        policy="cache_load",
        tiers=(
            TierEvidence(name="memory", medium="cpu", url="memory://kv"),
            TierEvidence(name="valkey", medium="remote", url="valkey://10.0.0.5:6379"),
        ),
        memory=(
            ("tier memory", judge_memory(host_bytes=128 * GIB, engine_bytes=16 * GIB, asked_bytes=40 * GIB)),
        ),
    ),
    probes=(
        ProbeEvidence(tier="valkey", url="valkey://10.0.0.5:6379", link=Link("valkey", 2e9, 0.0003)),
    ),
    rates=(Prefill("w0", 8000.0, 40),),
    formats=(FormatEvidence(tier="valkey", looked_at=200),),
    findings=(
        finding("memory", Found.OK, "caches may take 40 GiB of 128 GiB"),
        finding("engine_version", Found.OK, "vllm 0.32.0, tested", worker="w0"),
        finding("versions_equal", Found.OK),
    ),
    limits=Limits(cold_ttft_ms=500.0, kv_bytes_per_token=131_072.0),
)  # fmt: skip
"""Everything was shown: all items of all stages pass."""
