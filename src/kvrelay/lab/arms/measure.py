"""Runs all arms of a plan in their order and adds up what they recorded. What grows meanwhile is on disk at once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from kvrelay.core.gates.gate_file import GateFile
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.traces.cut import Cut, cut
from kvrelay.core.traces.plan import Plan, make_plan
from kvrelay.core.traces.trace import TraceError
from kvrelay.lab.arms.arm import ArmOutcome, ArmTask, primer_digest, run_arm
from kvrelay.lab.arms.contender import plan_problems
from kvrelay.lab.arms.fleets import ArmFleet, ArmWorker, FleetUnusable
from kvrelay.lab.arms.gate_store import GateStore
from kvrelay.lab.arms.manifest import ArmFacts, FleetFacts, Manifest, PlanFacts, fleet_facts, new_manifest
from kvrelay.lab.arms.order import arms_in_order
from kvrelay.lab.arms.planned import PlannedRow, planned_rows, rows_digest, write_rows
from kvrelay.lab.arms.results import ArmData, PolicyResult, policy_results
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sample_log import SampleLog
from kvrelay.lab.replay.trace_file import TraceFile

SAMPLES, RECEIPTS, MANIFEST = "samples.jsonl", "receipts.jsonl", "manifest.json"


class PlanRefused(Exception):
    """The contenders cannot be compared: more than one thing differs between neighbours."""


class Watcher(Protocol):
    """Somebody who wants to see progress."""

    def planned(self, plan: Plan, cut: Cut, order: Sequence[Arm]) -> None: ...
    def arm_started(self, arm: Arm) -> None: ...
    def sampled(self, sample: Sample) -> None: ...
    def arm_ended(self, facts: ArmFacts) -> None: ...


class Measured(Struct, frozen=True, eq=False):
    """What was stated, what was recorded, and the figures of each contender. `gates`: those that were stated."""

    manifest: Manifest
    rows: tuple[PlannedRow, ...]
    arms: tuple[ArmData, ...]
    results: dict[str, PolicyResult]
    gates: GateFile | None = None

    def receipts(self) -> list[Receipt]:
        """Of all arms in their order, primers included, with the digest of the manifest that they belong to."""
        return [
            msgspec.structs.replace(receipt, manifest_digest=self.manifest.digest)
            for data in self.arms
            for receipt in data.receipts.values()
        ]

    def arms_of(self, policy: str) -> list[ArmData]:
        return [data for data in self.arms if data.arm.policy == policy]

    def facts_of(self, policy: str) -> list[ArmFacts]:
        return [facts for facts in self.manifest.observed if facts.policy == policy]


async def measure(
    source: TraceFile,
    settings: RunSettings,
    fleet: ArmFleet,
    *,
    rule: str,
    out: Path,
    watcher: Watcher,
    gates: GateStore | None = None,
) -> Measured:
    """Raises TraceError, PlanRefused, OrderRefused, or what keeps an arm from being run."""
    problems = plan_problems(settings.contenders)
    if problems:
        raise PlanRefused("; ".join(problems))
    shortened = cut(source.trace, settings.cut)
    if not shortened.trace.requests:
        raise TraceError(1, "no request that fits the workers", f"turns within {settings.cut}")
    plan = make_plan(shortened.trace, settings.scale, seed=settings.seed)
    order = arms_in_order(settings.policies, settings.repeats, order=settings.order, reset=settings.reset)
    described = await fleet.describe()
    facts = fleet_facts(described.workers, described.model)
    block_size_tokens = _block_size(described.workers)
    rows = planned_rows(plan, block_size_tokens=block_size_tokens)
    task = ArmTask(plan, settings, fleet, described.model.name, block_size_tokens)
    manifest = new_manifest(
        source, shortened, plan, _plan_facts(plan, rows, task, facts), settings, order, facts,
        rule=rule, gates=None if gates is None else gates.facts(),
    )  # fmt: skip
    _prepare(out, manifest, rows, gates)
    watcher.planned(plan, shortened, order)
    outcomes = await _run_arms(order, task, manifest, out, watcher)
    arms = tuple(outcome.data for outcome in outcomes)
    observed = tuple(outcome.facts for outcome in outcomes)
    measured = Measured(
        manifest=msgspec.structs.replace(manifest, observed=observed),
        rows=rows,
        arms=arms,
        results=policy_results(arms, rows),
        gates=None if gates is None else gates.file,
    )
    write_receipts(measured, out)
    return measured


def write_manifest(out: Path, manifest: Manifest) -> None:
    (out / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def write_receipts(measured: Measured, out: Path) -> None:
    """All arms' receipts in one file, each with the digest of the manifest beside it."""
    lines = [msgspec.json.encode(receipt) + b"\n" for receipt in measured.receipts()]
    (out / RECEIPTS).write_bytes(b"".join(lines))


def _plan_facts(plan: Plan, rows: Sequence[PlannedRow], task: ArmTask, fleet: FleetFacts) -> PlanFacts:
    primer = primer_digest(task.settings, task.model, fleet.workers, task.block_size_tokens)
    return PlanFacts(
        sha256=plan.digest(),
        turns_sha256=rows_digest(rows),
        primer_sha256=primer,
        seed=plan.seed,
        sessions=len(plan.sessions),
        requests=plan.requests,
        prompt_tokens=plan.prompt_tokens,
    )


def _block_size(workers: Sequence[ArmWorker]) -> int:
    """The smallest: what is shared is counted in whole blocks, and no finer grain is lost."""
    sizes = [worker.block_size_tokens for worker in workers if worker.block_size_tokens]
    if not sizes:
        raise FleetUnusable("no worker says its block size; state `block_size` of each in the fleet file")
    return min(sizes)


def _prepare(out: Path, manifest: Manifest, rows: Sequence[PlannedRow], gates: GateStore | None) -> None:
    write_manifest(out, manifest)
    write_rows(out, rows)
    if gates is not None:
        gates.keep(out)
    shutil.rmtree(out / "arms", ignore_errors=True)  # of an earlier run: its receipts must not be counted again


async def _run_arms(
    order: Sequence[Arm], task: ArmTask, manifest: Manifest, out: Path, watcher: Watcher
) -> list[ArmOutcome]:
    outcomes: list[ArmOutcome] = []
    with SampleLog(out / SAMPLES) as log:

        def keep(sample: Sample) -> None:
            log.write(sample)
            watcher.sampled(sample)

        for arm in order:
            watcher.arm_started(arm)
            outcome = await run_arm(arm, task, folder=out / "arms" / arm.name, on_sample=keep)
            outcomes.append(outcome)
            manifest = msgspec.structs.replace(manifest, observed=(*manifest.observed, outcome.facts))
            write_manifest(out, manifest)
            watcher.arm_ended(outcome.facts)
    return outcomes
