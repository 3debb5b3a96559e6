"""A run that never happened, with plausible numbers, for tests of tables and pages. Same seed, same run."""

from __future__ import annotations

import random

import msgspec

from kvrelay.core.model.units import IndexState, RouteReason, Status
from kvrelay.core.receipts.receipt import Attempt, Candidate, GateLoss, Receipt
from kvrelay.core.traces.cut import cut
from kvrelay.core.traces.plan import Plan, make_plan
from kvrelay.lab.arms.manifest import ArmFacts, ProcessFacts, new_manifest
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.order import rotated_order
from kvrelay.lab.arms.results import ArmData, policy_results
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.demo.demo import DemoRun
from kvrelay.lab.demo.verdict import RULE, judge
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.trace_file import bundled_trace

WORKERS = tuple(f"mock-{number}" for number in range(4))
HIT_SHARE = {"round_robin": 0.25, "sticky": 0.78, "cache_load": 0.82}


def made_up_run(*, seed: int = 5, settings: RunSettings = RunSettings()) -> DemoRun:
    source = bundled_trace()
    shortened = cut(source.trace, settings.cut)
    plan = make_plan(shortened.trace, settings.scale, seed=settings.seed)
    order = rotated_order(settings.policies, settings.repeats)
    manifest = new_manifest(source, shortened, plan, settings, order, rule=RULE)
    draw = random.Random(seed)
    arms = tuple(_arm(arm, plan, draw) for arm in order)
    results = policy_results(arms, plan, block_size_tokens=settings.fleet.block_size_tokens)
    observed = tuple(_facts(data, number) for number, data in enumerate(arms))
    return DemoRun(Measured(msgspec.structs.replace(manifest, observed=observed), arms, results), judge(results))


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
    return ArmData(arm, WORKERS, tuple(samples), receipts)


def _sample(
    arm: Arm, request_id: str, session_id: str, turn: int, due_ms: float, ttft_ms: float, hit: int, worker: str
) -> Sample:
    return Sample(
        arm=arm.name, policy=arm.policy, repeat=arm.repeat, request_id=request_id, session_id=session_id, turn=turn,
        due_ms=due_ms, sent_ms=due_ms + 0.3, ended_ms=due_ms + ttft_ms + 60,
        ttft_ms=ttft_ms, ttft_sent_ms=ttft_ms - 0.3, itl_ms=(4.0, 4.2, 4.1),
        http_status=200, worker=worker, completion_tokens=16, cached_tokens=hit,
    )  # fmt: skip


def _receipt(arm: Arm, sample: Sample, eligible: int, hit: int, draw: random.Random) -> Receipt:
    lost = eligible - hit
    route = int(lost * {"round_robin": 0.6, "sticky": 0.1, "cache_load": 0.05}[arm.policy])
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
    processes = [ProcessFacts("gateway", 1000 + number * 10, ("http://127.0.0.1:1",))]
    processes += [ProcessFacts(name, 1001 + number * 10 + at, (), "made-up") for at, name in enumerate(data.workers)]
    return ArmFacts(
        data.arm.name, data.arm.policy, data.arm.repeat, tuple(processes), 0, 4.2, len(data.receipts) + 8,
        len(data.samples), (),
    )  # fmt: skip
