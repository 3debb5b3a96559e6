"""What follows from a measured run: who is ahead, how sure that is, and what the gates say. Nothing is measured here.

The same function rules at the end of a run and whenever its folder is read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from kvrelay.core.gates.evidence import Evidence, Registration
from kvrelay.core.gates.gate_file import Edges
from kvrelay.core.gates.judge import Compared, Value, Verdict, judge
from kvrelay.lab.arms.judged import evidence_of, figures_of
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.pairs import Comparisons, compare_policies
from kvrelay.lab.arms.ranking import Ranking, rank
from kvrelay.lab.arms.recount import recount
from kvrelay.lab.arms.sameness import Sameness, sameness_of


class Ruling(Struct, frozen=True, eq=False):
    """`comparisons` are of every other contender against the baseline. `verdict` is None for a run without gates."""

    baseline: str
    ranking: Ranking
    comparisons: Mapping[str, Comparisons]
    figures: Mapping[str, Mapping[str, Value]]
    evidence: Evidence
    sameness: Sameness
    verdict: Verdict | None


class Run(Struct, frozen=True, eq=False):
    """A measured run and what follows from it."""

    measured: Measured
    ruling: Ruling


def rule_on(measured: Measured, folder: Path, registration: Registration) -> Ruling:
    """`folder` has the arms' configurations."""
    gates, manifest = measured.gates, measured.manifest
    baseline = gates.baseline if gates is not None else next(iter(measured.manifest.stated.settings.policies))
    sameness = sameness_of(folder, manifest)
    unanswered = recount(manifest, measured.rows, measured.arms)
    judged = measured.results
    if gates is not None:
        judged = {name: judged[name] for name in (gates.candidate, gates.baseline) if name in judged}
    evidence = evidence_of(manifest, judged, registration, unanswered, sameness.problems)
    edges = gates.edges if gates is not None else Edges()
    comparisons = {
        policy: compare_policies(
            measured.arms_of(baseline), measured.arms_of(policy), measured.rows, edges, seed=manifest.stated.plan.seed
        )
        for policy in measured.results
        if policy != baseline
    }
    figures = {
        policy: figures_of(
            policy_result, measured.arms_of(policy), measured.facts_of(policy), measured.rows,
            measured.arms_of(baseline),
        )
        for policy, policy_result in measured.results.items()
    }  # fmt: skip
    verdict = None
    if gates is not None:
        candidate = comparisons.get(gates.candidate)
        verdict = judge(gates, figures, Compared() if candidate is None else candidate.compared, evidence)
    return Ruling(
        baseline=baseline,
        ranking=rank(measured.results, label=manifest.stated.label),
        comparisons=comparisons,
        figures=figures,
        evidence=evidence,
        sameness=sameness,
        verdict=verdict,
    )
