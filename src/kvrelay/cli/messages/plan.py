"""What `kvrelay plan` and `kvrelay verdict` say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.core.checklist.ladder import Step
    from kvrelay.edge.connectors.sglang.hicache import HostRam
    from kvrelay.lab.arms.tier_verdict import TierVerdict
    from kvrelay.lab.plan.tiers import TierPlan

STAGES = {
    "router": "route by cache and load",
    "cpu": "add a tier in host memory",
    "remote": "add a tier that hosts share",
    "split": "prefill and decode on different workers",
}


def ladder(steps: Sequence[Step]) -> str:
    lines = []
    for number, step in enumerate(steps, 1):
        state = {"pass": "shown", "fail": "REFUTED"}.get(step.shown.verdict.value, "open" if step.open else "closed")
        lines.append(f"{number}. {step.stage.value:7} {state:8} {STAGES[step.stage.value]}: {step.shown.reason}")
        lines += [f"     evidence: {where}" for where in step.shown.evidence]
        if not step.open:
            lines.append(f"     not yet: {step.why}")
    return "\n".join(lines) + "\n"


def too_early(stage: str, why: str) -> str:
    return (
        f"error: `{stage}` comes later (order: router, cpu, remote, split)\n"
        f"  not shown yet: {why}\n"
        "hint: kvrelay plan show --evidence DIR; `--rehearsal` lets runs on mock workers count"
    )


def may_be_tried(stage: str, why: str) -> str:
    return f"{stage}: may be tried ({why})\n"


def planned(plan: TierPlan, files: Sequence[object]) -> str:
    width = max(len(arm.name) for arm in plan.arms)
    blocks = list(dict.fromkeys(cell.block for cell in plan.cells))
    lines = [f"{len(plan.cells)} measurements under `{plan.policy}` on {plan.engine} workers:"]
    lines += [f"  {arm.name:{width}}  {', '.join(blocks)}" for arm in plan.arms]
    lines += ["", *plan.commands, "", "written: " + ", ".join(str(file) for file in files)]
    return "\n".join(lines) + "\n"


def host_ram(ram: HostRam, *, ranks: int) -> str:
    gib = 2**30
    return (
        f"host memory: {ranks} {'pool needs' if ranks == 1 else 'pools need'} {ram.needed_bytes / gib:.1f} GiB, "
        f"{ram.free_bytes / gib:.1f} GiB are free and {ram.reserve_bytes / gib:.1f} of them stay so: "
        f"{'fits' if ram.fits else 'does not fit'}"
    )


def no_room(ram: HostRam, ratio: float) -> str:
    least = ratio * ram.usable_bytes / ram.needed_bytes
    hint = f"hint: a ratio of at most {least:.2f} fits" if least > 1 else "hint: there is no room for a host tier here"
    return f"error: the host's memory does not hold the tier; the server would end at its start\n{hint}"


def no_memory_figures() -> str:
    return "error: this machine does not say how much memory is free\nhint: give it with --free-memory GIB"


def tier_story(found: TierVerdict, label: str) -> str:
    verdict = found.verdict
    what = " and ".join(found.tier) or "what differs between the two runs (they do not record the workers' tiers)"
    lines = [f"{found.decision.value.upper()} {what}: {verdict.candidate} against {verdict.baseline}", f"  {label}"]
    width = max(len(gate.name) for gate in verdict.gates)
    lines += [f"  {gate.outcome.value:8} {gate.name:{width}}  {gate.reason}" for gate in verdict.gates]
    doubts = [reason for reason in verdict.reasons if reason.startswith("insufficient evidence")]
    return "\n".join([*lines, *(f"  unknown  {doubt}" for doubt in doubts)]) + "\n"


LABELS = {
    "mock": "mock workers: modelled times, not the performance of any engine",
    "single_worker_baseline": "one worker: nothing was routed",
    "routing_result": "a fleet of real workers",
}


def not_comparable(reasons: Sequence[str]) -> str:
    hint = "hint: kvrelay plan make writes arms that differ in one tier each"
    listed = (f"  {reason}" for reason in reasons)
    return "\n".join(["error: the two arms differ in more than one tier", *listed, hint])


def no_pair(folder: object, arms: Sequence[str]) -> str:
    return (
        f"error: `{folder}` has no two arms that differ in one tier (arms: {', '.join(arms) or 'none'})\n"
        "hint: name them with --candidate and --baseline, or a second run with --baseline-run"
    )
