"""Runs all arms of a plan in their order and adds up what they recorded."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.traces.cut import Cut, cut
from kvrelay.core.traces.plan import Plan, make_plan
from kvrelay.core.traces.trace import TraceError
from kvrelay.lab.arms.arm import ArmOutcome, run_arm
from kvrelay.lab.arms.manifest import ArmFacts, Manifest, new_manifest
from kvrelay.lab.arms.order import rotated_order
from kvrelay.lab.arms.results import ArmData, PolicyResult, policy_results
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sample_log import SampleLog
from kvrelay.lab.replay.trace_file import TraceFile


class Watcher(Protocol):
    """Somebody who wants to see progress."""

    def planned(self, plan: Plan, cut: Cut, order: Sequence[Arm]) -> None: ...
    def arm_started(self, arm: Arm) -> None: ...
    def sampled(self, sample: Sample) -> None: ...
    def arm_ended(self, facts: ArmFacts) -> None: ...


class Measured(Struct, frozen=True, eq=False):
    """What was stated, what was recorded, and the figures of each contender."""

    manifest: Manifest
    arms: tuple[ArmData, ...]
    results: dict[str, PolicyResult]

    def receipts(self) -> list[Receipt]:
        """Of all arms in their order, primers included, with the digest of the manifest that they belong to."""
        return [
            msgspec.structs.replace(receipt, manifest_digest=self.manifest.digest)
            for data in self.arms
            for receipt in data.receipts.values()
        ]


async def measure(source: TraceFile, settings: RunSettings, *, rule: str, out: Path, watcher: Watcher) -> Measured:
    """Files that grow during the run (`samples.jsonl`, `manifest.json`) are in `out` even when an arm breaks it off."""
    shortened = cut(source.trace, settings.cut)
    if not shortened.trace.requests:
        raise TraceError(1, "no request that fits the demo's mock workers", f"turns within {settings.cut}")
    plan = make_plan(shortened.trace, settings.scale, seed=settings.seed)
    order = rotated_order(settings.policies, settings.repeats)
    manifest = new_manifest(source, shortened, plan, settings, order, rule=rule)
    watcher.planned(plan, shortened, order)
    outcomes = await _run_arms(order, plan, settings, manifest, out, watcher)
    arms = tuple(outcome.data for outcome in outcomes)
    results = policy_results(arms, plan, block_size_tokens=settings.fleet.block_size_tokens)
    observed = tuple(outcome.facts for outcome in outcomes)
    return Measured(msgspec.structs.replace(manifest, observed=observed), arms, results)


async def _run_arms(
    order: Sequence[Arm], plan: Plan, settings: RunSettings, manifest: Manifest, out: Path, watcher: Watcher
) -> list[ArmOutcome]:
    outcomes: list[ArmOutcome] = []
    write_manifest(out, manifest)
    shutil.rmtree(out / "arms", ignore_errors=True)  # of an earlier run: its receipts must not be counted again
    with SampleLog(out / "samples.jsonl") as log:

        def keep(sample: Sample) -> None:
            log.write(sample)
            watcher.sampled(sample)

        for arm in order:
            watcher.arm_started(arm)
            outcome = await run_arm(arm, plan, settings, folder=out / "arms" / arm.name, on_sample=keep)
            outcomes.append(outcome)
            manifest = msgspec.structs.replace(manifest, observed=(*manifest.observed, outcome.facts))
            write_manifest(out, manifest)
            watcher.arm_ended(outcome.facts)
    return outcomes


def write_manifest(out: Path, manifest: Manifest) -> None:
    (out / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
