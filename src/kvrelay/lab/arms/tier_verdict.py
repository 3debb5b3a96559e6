"""Keep or drop a tier: one arm with it against one without, request by request, of one run or of two of one plan.

Two runs are for fleets that cannot be given other tiers between arms: the same workers are started without the tier,
measured, started with it and measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvrelay.core.gates.evidence import Evidence, Registration, hardware_of
from kvrelay.core.gates.judge import Verdict, judge
from kvrelay.core.gates.tier import DECISIONS, Decision, tier_gates, with_tail
from kvrelay.lab.arms.arm_store import media
from kvrelay.lab.arms.contender import factor_of, plain_key, read_flat
from kvrelay.lab.arms.judged import evidence_of, figures_of
from kvrelay.lab.arms.pairs import compare_policies
from kvrelay.lab.arms.recount import recount
from kvrelay.lab.arms.ruling import Run
from kvrelay.lab.arms.sameness import CONFIG, compare_configs


class NotComparable(Exception):
    """The two arms differ in more than the tier; `reasons` has one line for each difference."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


class Side(Struct, frozen=True, eq=False):
    """One arm of a run, all its repeats. `name` is the contender's."""

    run: Run
    folder: Path
    name: str

    @property
    def label(self) -> str:
        return f"{self.name} of {self.folder}"


class TierVerdict(Struct, frozen=True):
    """`tier`: what the candidate has and the baseline has not: the medium, or of workers that ran already the
    implementation; empty where that could not be seen."""

    decision: Decision
    tier: tuple[str, ...]
    verdict: Verdict


def tier_verdict(baseline: Side, candidate: Side) -> TierVerdict:
    """Raises NotComparable."""
    tier = _difference(baseline, candidate)
    rows = candidate.run.measured.rows
    base_arms = baseline.run.measured.arms_of(baseline.name)
    arms = candidate.run.measured.arms_of(candidate.name)
    gates = tier_gates(candidate=candidate.label, baseline=baseline.label)
    seed = candidate.run.measured.manifest.stated.plan.seed
    compared = with_tail(compare_policies(base_arms, arms, rows, gates.edges, seed=seed).compared)
    figures = {
        side.label: figures_of(
            side.run.measured.results[side.name],
            side.run.measured.arms_of(side.name),
            side.run.measured.facts_of(side.name),
            side.run.measured.rows,
            base_arms,
        )
        for side in (baseline, candidate)
    }
    verdict = judge(gates, figures, compared, _evidence(baseline, candidate))
    return TierVerdict(DECISIONS[verdict.verdict], tier, verdict)


def added_by(folder: Path, run: Run, name: str) -> tuple[str, ...]:
    """Media of the tiers that an arm was started with, nearest first."""
    return media(read_flat(_config(Side(run, folder, name))))


def _difference(baseline: Side, candidate: Side) -> tuple[str, ...]:
    left, right = baseline.run.measured.manifest.stated, candidate.run.measured.manifest.stated
    reasons = [
        f"{what} differ: {one} and {other}"
        for what, one, other in (
            ("plans", left.plan.sha256[:12], right.plan.sha256[:12]),
            ("traces", left.trace.sha256[:12], right.trace.sha256[:12]),
            ("models", left.fleet.model.revision, right.fleet.model.revision),
            ("engines", ", ".join(left.fleet.engines), ", ".join(right.fleet.engines)),
            ("hardware", left.fleet.hardware, right.fleet.hardware),
        )
        if one != other
    ]
    found = compare_configs(_config(baseline), _config(candidate))
    reasons += [
        f"`{one.key}` is `{one.left}` and `{one.right}`: the router has to stay as it is"
        for one in found
        if factor_of(plain_key(one.key)) != "store"
    ]
    without = added_by(baseline.folder, baseline.run, baseline.name)
    tier = [name for name in added_by(candidate.folder, candidate.run, candidate.name) if name not in without]
    if len(tier) != 1 and baseline.run is candidate.run:
        has = " and ".join(tier) or "no tier"
        reasons.append(f"`{candidate.name}` has {has} beyond `{baseline.name}`; one is judged")
    if baseline.run is not candidate.run and not tier:
        tier, why = _of_workers(baseline, candidate)
        reasons += why
    if reasons:
        raise NotComparable(reasons)
    return tuple(tier)


def _of_workers(baseline: Side, candidate: Side) -> tuple[list[str], list[str]]:
    """What the workers of the second run were started with, and why that is no difference. Workers on other machines
    do not show it, and then nobody but the operator knows."""
    left, right = _tiering(baseline), _tiering(candidate)
    if None in left | right:
        return [], []
    if left == right:
        return [], [f"the workers of both runs were started with the same tiers: {', '.join(sorted(map(str, left)))}"]
    return sorted(str(name) for name in right), []


def _tiering(side: Side) -> set[str | None]:
    facts = side.run.measured.facts_of(side.name)
    return {process.tiering for one in facts for process in one.processes if process.role == "worker"}


def _evidence(baseline: Side, candidate: Side) -> Evidence:
    """The worse of both in everything."""
    left, right = (_of_side(side) for side in (baseline, candidate))
    lists = ("contaminated_arms", "unverified_arms", "late_arms", "unanswered_records", "sameness_broken")
    return msgspec.structs.replace(
        right,
        repeats=min(left.repeats, right.repeats),
        answered_requests=min(left.answered_requests, right.answered_requests),
        hardware=hardware_of([left.hardware, right.hardware]),
        **{name: tuple(dict.fromkeys((*getattr(left, name), *getattr(right, name)))) for name in lists},
    )


def _of_side(side: Side) -> Evidence:
    measured = side.run.measured
    arms = measured.arms_of(side.name)
    names = {data.arm.name for data in arms}
    manifest = msgspec.structs.replace(
        measured.manifest, observed=tuple(one for one in measured.manifest.observed if one.arm in names)
    )
    unanswered = recount(measured.manifest, measured.rows, measured.arms)
    return evidence_of(manifest, {side.name: measured.results[side.name]}, Registration.REGISTERED, unanswered, ())


def _config(side: Side) -> Path:
    """Of the first repeat; all of them are started with the same."""
    return side.folder / "arms" / side.run.measured.facts_of(side.name)[0].arm / CONFIG
