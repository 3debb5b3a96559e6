"""One policy over one workload, once: a gateway of its own over workers that all arms share, and what came out.

Arms are isolated by a cache salt: the workers' caches are full of earlier arms' blocks, which no salted request can hit
and which are evicted first. That this holds is checked: an arm's hits may not exceed what it sent before itself.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.receipts.reconcile import reconcile
from kvrelay.core.stats.balance import max_over_mean
from kvrelay.core.stats.seen_before import SeenBefore
from kvrelay.core.traces.plan import Plan
from kvrelay.lab.arms.arm import read_receipts
from kvrelay.lab.arms.gateway_process import GatewayProcess
from kvrelay.lab.replay.client import CompletionClient
from kvrelay.lab.replay.replay import Arm, replay
from kvrelay.lab.replay.sample import Sample

READY_TIMEOUT_S, REQUEST_TIMEOUT_S = 120.0, 300.0


class Fleet(Struct, frozen=True):
    """Workers that run already: the lines of their `[[workers]]` tables."""

    label: str
    model: str
    block_size_tokens: int
    workers: dict[str, list[str]]  # by name
    measured_rate: Callable[[], float]  # prefilled tokens per second of each, now, while all of them compute


class Result(Struct, frozen=True):
    """What one arm did. Shares are of all its prompt tokens."""

    policy: str
    repeat: int
    requests: int
    failures: int
    prompt_tokens: int
    hit_share: float
    ceiling_share: float  # with one endless cache
    requests_of: dict[str, int]
    prefilled_of: dict[str, int]  # prompt tokens computed, by worker
    prefilled_max_over_mean: float
    busiest_share: float  # of the requests, at the worker that got most
    ttft_ms: list[float]
    within_one_block: float  # share of requests whose claim was right to a block
    computations_of_hot: int  # how often the longest shared prefix was computed


async def run_arm(fleet: Fleet, plan: Plan, arm: Arm, folder: Path) -> Result:
    folder.mkdir(parents=True)  # noqa: ASYNC240
    samples: list[Sample] = []
    config = _write_config(fleet, arm, folder)
    async with GatewayProcess(config, log=folder / "gateway.log", ready_timeout_s=READY_TIMEOUT_S) as gateway:
        await gateway.wait_for_workers(list(fleet.workers))
        async with CompletionClient(gateway.ready.url, timeout_s=REQUEST_TIMEOUT_S) as client:
            salt = secrets.token_hex(8)
            await replay(plan, client, arm=arm, model=fleet.model, on_sample=samples.append, cache_salt=salt)
            await asyncio.sleep(0.2)  # the last receipts are on their way to the file
    receipts = {receipt.request_id: receipt for receipt in read_receipts(folder / "receipts.jsonl")}
    return _result(fleet, plan, arm, samples, receipts)


def _write_config(fleet: Fleet, arm: Arm, folder: Path) -> Path:
    lines = ["[gateway]", "port = 0", "admin_port = 0", f"policy = {json.dumps(arm.policy)}"]
    lines += ["[gateway.drain]", "grace_s = 3.0", "[receipts]"]
    lines.append(f"path = {json.dumps(str(folder.resolve() / 'receipts.jsonl'))}")
    for name, own in fleet.workers.items():
        lines += ["[[workers]]", f"name = {json.dumps(name)}", *own]
    path = folder / "gateway.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _result(fleet: Fleet, plan: Plan, arm: Arm, samples: Sequence[Sample], receipts: dict[str, Receipt]) -> Result:
    prompts = {session.session_id: [turn.token_ids for turn in session.turns] for session in plan.sessions}
    total = sum(len(prompts[sample.session_id][sample.turn]) for sample in samples)
    seen = SeenBefore(fleet.block_size_tokens)
    ceiling = sum(seen.take(prompts[s.session_id][s.turn]) for s in sorted(samples, key=lambda s: s.sent_ms))
    requests_of, prefilled_of = Counter[str](), Counter[str]()
    hits, cold = 0, 0
    for sample in samples:
        if sample.worker is None or sample.cached_tokens is None:
            continue
        tokens = len(prompts[sample.session_id][sample.turn])
        requests_of[sample.worker] += 1
        prefilled_of[sample.worker] += tokens - sample.cached_tokens
        hits += sample.cached_tokens
        cold += not sample.session_id.startswith("cold") and sample.cached_tokens < 0.5 * tokens
    compared = reconcile([receipt for receipt in receipts.values() if receipt.actual_cached_tokens is not None])
    return Result(
        policy=arm.policy,
        repeat=arm.repeat,
        requests=len(samples),
        failures=sum(not sample.ok for sample in samples),
        prompt_tokens=total,
        hit_share=hits / total,
        ceiling_share=ceiling / total,
        requests_of=dict(requests_of),
        prefilled_of=dict(prefilled_of),
        prefilled_max_over_mean=max_over_mean({name: float(prefilled_of[name]) for name in fleet.workers}) or 0.0,
        busiest_share=max(requests_of.values(), default=0) / max(1, len(samples)),
        ttft_ms=[sample.ttft_ms for sample in samples if sample.ttft_ms is not None],
        within_one_block=compared.within_one_block / max(1, compared.compared),
        computations_of_hot=cold,
    )
