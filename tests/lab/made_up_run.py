"""A run that never happened, with plausible numbers, for tests of tables and pages. Same seed, same run."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from kvrelay.core.gates.evidence import Registration
from kvrelay.core.gates.gate_file import GateFile
from kvrelay.core.model.units import IndexState, RouteReason, Status
from kvrelay.core.receipts.receipt import Attempt, Candidate, GateLoss, Receipt
from kvrelay.core.traces.cut import cut
from kvrelay.core.traces.plan import Plan, make_plan
from kvrelay.lab.arms.arm import write_config
from kvrelay.lab.arms.contender import Contender
from kvrelay.lab.arms.counters import Counted
from kvrelay.lab.arms.fleets import FreshMocks
from kvrelay.lab.arms.isolation import Isolation, IsolationState
from kvrelay.lab.arms.manifest import ArmFacts, PlanFacts, ProcessFacts, fleet_facts, new_manifest
from kvrelay.lab.arms.measure import SAMPLES, Measured, write_manifest
from kvrelay.lab.arms.order import rotated_order
from kvrelay.lab.arms.planned import planned_rows, rows_digest, write_rows
from kvrelay.lab.arms.ranking import RULE
from kvrelay.lab.arms.results import ArmData, policy_results
from kvrelay.lab.arms.ruling import Run, rule_on
from kvrelay.lab.arms.settings import Reset, RunSettings
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sample_log import SampleLog
from kvrelay.lab.replay.trace_file import bundled_trace

WORKERS = tuple(f"mock-{number}" for number in range(4))
HIT_SHARE = {
    "round_robin": 0.25, "sticky": 0.78, "cache_load": 0.82,
    "gpu": 0.3, "gpu+cpu": 0.6, "gpu+cpu+remote": 0.85,
}  # fmt: skip

TIERS = ({"url": "memory://x", "bytes": 9}, {"url": "file:///x/kv"})
TIER_ARMS = tuple(
    Contender(name, {"gateway.policy": "cache_load"}, {"tiers": list(TIERS[:tiers])} if tiers else None)
    for name, tiers in (("gpu", 0), ("gpu+cpu", 1), ("gpu+cpu+remote", 2))
)
"""What a plan of tiers has as arms."""


def made_up_run(*, seed: int = 5, settings: RunSettings = RunSettings(), gates: GateFile | None = None) -> Run:
    """In a folder that is not there: configurations cannot be compared, and the ruling says so."""
    measured = made_up_measured(seed=seed, settings=settings, gates=gates)
    return Run(measured, rule_on(measured, Path("/nonexistent"), Registration.NO_GATES))


def made_up_measured(
    *, seed: int = 5, settings: RunSettings = RunSettings(), gates: GateFile | None = None
) -> Measured:
    source = bundled_trace()
    shortened = cut(source.trace, settings.cut)
    plan = make_plan(shortened.trace, settings.scale, seed=settings.seed)
    rows = planned_rows(plan, block_size_tokens=16)
    order = rotated_order(settings.policies, settings.repeats)
    described = FreshMocks(settings.fleet, ready_timeout_s=1).as_specified()
    facts = PlanFacts(
        plan.digest(), rows_digest(rows), "primer", plan.seed, len(plan.sessions), plan.requests, plan.prompt_tokens
    )
    fleet = fleet_facts(described.workers, described.model)
    manifest = new_manifest(source, shortened, plan, facts, settings, order, fleet, rule=RULE, gates=None)
    draw = random.Random(seed)
    arms = tuple(_arm(arm, plan, draw) for arm in order)
    observed = tuple(_facts(data, number) for number, data in enumerate(arms))
    return Measured(msgspec.structs.replace(manifest, observed=observed), rows, arms, policy_results(arms, rows), gates)


def write_run(measured: Measured, folder: Path) -> None:
    """As `measure` leaves it, so that it can be read back."""
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, measured.manifest)
    write_rows(folder, measured.rows)
    with SampleLog(folder / SAMPLES) as log:
        for data in measured.arms:
            for sample in data.samples:
                log.write(sample)
    for data in measured.arms:
        own = folder / "arms" / data.arm.name
        own.mkdir(parents=True)
        write_config(own, measured.manifest.stated.settings.contender(data.arm.policy), ())
        (own / "seen.json").write_bytes(msgspec.json.encode(data.seen_tokens))
        lines = [msgspec.json.encode(receipt) + b"\n" for receipt in data.receipts.values()]
        (own / "receipts.jsonl").write_bytes(b"".join(lines))


def made_up_plan(settings: RunSettings = RunSettings()) -> Plan:
    return make_plan(cut(bundled_trace().trace, settings.cut).trace, settings.scale, seed=settings.seed)


def _arm(arm: Arm, plan: Plan, draw: random.Random) -> ArmData:
    samples, receipts = [], {}
    for number, session in enumerate(plan.sessions):
        for index, turn in enumerate(session.turns):
            worker = WORKERS[(number if arm.policy == "sticky" else draw.randrange(4)) % 4]
            eligible = turn.token_ids.size // 16 * 16
            hit = int(eligible * HIT_SHARE[arm.policy] * draw.uniform(0.6, 1.0)) // 16 * 16 if index else 0
            ttft_ms = 6 + (turn.token_ids.size - hit) / 42.0 * draw.uniform(1.0, 2.5)
            request_id = f"{arm.name}:{session.session_id}:{index}"
            samples.append(_sample(arm, request_id, session.session_id, index, turn.due_ms, ttft_ms, hit, worker))
            receipts[request_id] = _receipt(arm, samples[-1], eligible, hit, draw)
    seen = {name: receipt.actual_cached_tokens or 0 for name, receipt in receipts.items()}
    return ArmData(arm, WORKERS, tuple(samples), receipts, seen, max(sample.ended_ms for sample in samples) / 1000)


def _sample(
    arm: Arm, request_id: str, session_id: str, turn: int, due_ms: float, ttft_ms: float, hit: int, worker: str
) -> Sample:
    return Sample(
        arm=arm.name, policy=arm.policy, repeat=arm.repeat, request_id=request_id, session_id=session_id, turn=turn,
        due_ms=due_ms, sent_ms=due_ms + 0.3, ended_ms=due_ms + ttft_ms + 60,
        first_token_ms=due_ms + ttft_ms, ttft_ms=ttft_ms, ttft_sent_ms=ttft_ms - 0.3, itl_ms=(4.0, 4.2, 4.1),
        http_status=200, worker=worker, completion_tokens=16, cached_tokens=hit,
    )  # fmt: skip


def _receipt(arm: Arm, sample: Sample, eligible: int, hit: int, draw: random.Random) -> Receipt:
    lost = eligible - hit
    route = int(lost * {"round_robin": 0.6, "sticky": 0.1, "cache_load": 0.05}.get(arm.policy, 0.2))
    residency = 16 if sample.turn % 4 == 3 and lost > route + 16 else 0
    worker = sample.worker or ""
    return Receipt(
        request_id=sample.request_id, session_id=sample.session_id, tenant="default", path="/v1/completions",
        model="mock-model", prefix_fingerprint=None, policy=arm.policy, eligible_prefix_blocks=eligible // 16,
        eligible_prefix_tokens=eligible, block_size=16, chosen_worker=worker, incarnation="made-up", rank=0,
        matched_blocks_at_route=(hit + residency) // 16, matched_tokens_at_route=hit + residency,
        matched_tiers_at_route={"gpu": hit + residency}, worker_queue_at_route=draw.randrange(3), load_snapshot=7,
        route_reason=RouteReason.CACHE_PLUS_LOAD if arm.policy == "cache_load" else RouteReason.ROUND_ROBIN,
        spilled_from=None, candidates_total=4,
        candidates=(Candidate(worker, "made-up", 0, {"gpu": hit}, {"active_requests": 1.0}, {"queue_ms": 3.0}, 3.0),),
        index_state=IndexState.LIVE, attempts=(Attempt(1, worker, "made-up", 0, RouteReason.ROUND_ROBIN, 0.1),),
        actual_local_hits=hit // 16, actual_cached_tokens=hit,
        gate_loss_tokens=GateLoss(lost - route - residency, route, residency, 0), ttft_ms=sample.ttft_ms,
        e2e_ms=90.0, decision_us=80.0, prompt_tokens=eligible + 5, completion_tokens=16, status=Status.OK,
        http_status=200,
    )  # fmt: skip


def _facts(data: ArmData, number: int) -> ArmFacts:
    names = ("gateway", *data.workers)
    processes = tuple(
        ProcessFacts(
            name=name, role="worker" if at else "router", pid=1000 + number * 10 + at, urls=("http://127.0.0.1:1",),
            log="log", version="mock", incarnation="made-up", hardware="mock" if at else None, gpu_uuids=(),
            block_size_tokens=16 if at else None, router_block_size_tokens=16 if at else None, hash_seed="0",
        )
        for at, name in enumerate(names)
    )  # fmt: skip
    hits = sum(sample.cached_tokens or 0 for sample in data.samples) // len(data.workers)
    counted = Counted(hits * 2, hits, 0, 0, 0.6)
    return ArmFacts(
        arm=data.arm.name, policy=data.arm.policy, repeat=data.arm.repeat, started_s=1_000.0 + number,
        processes=processes, config_sha256="made-up", index_blocks_at_start=0,
        isolation=Isolation(Reset.FRESH_PROCESSES, IsolationState.CLEAN, "made up", 0, 0, 0, 0, 0.5),
        counters=dict.fromkeys(data.workers, counted), schedule_sha256="same", wall_s=4.2, replay_s=data.replay_s,
        receipts=len(data.receipts), samples=len(data.samples), leftovers=(), primer_sha256="same",
    )  # fmt: skip
