"""The order in which things are added: router, CPU tier, remote tier, prefill/decode split. No step before the last one
has been shown to be worth it, because each adds a cause and only one at a time can be told."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from kvrelay.core.checklist.dossier import ArmEvidence, Dossier, RunEvidence
from kvrelay.core.checklist.item import Answer, passed, unknown
from kvrelay.core.gates.evidence import LABELS, Layer
from kvrelay.core.gates.judge import Outcome


class Stage(StrEnum):
    ROUTER = "router"
    CPU = "cpu"
    REMOTE = "remote"
    SPLIT = "split"


ORDER = tuple(Stage)


class Step(Struct, frozen=True, kw_only=True):
    """`open`: whether it may be tried now, with the reason. `shown`: whether it has been shown to be worth it."""

    stage: Stage
    open: bool
    why: str
    shown: Answer


def ladder(dossier: Dossier, *, rehearsal: bool = False) -> tuple[Step, ...]:
    """`rehearsal`: runs on mock workers count as well."""
    steps: list[Step] = []
    for stage in ORDER:
        before = steps[-1] if steps else None
        is_open = before is None or (before.open and before.shown.verdict is Outcome.PASS)
        why = "nothing comes before it" if before is None else f"{before.stage.value}: {before.shown.reason}"
        if before is not None and not before.open:
            why = f"{before.stage.value} may not be tried itself yet"
        steps.append(Step(stage=stage, open=is_open, why=why, shown=_shown(dossier, stage, rehearsal=rehearsal)))
    return tuple(steps)


def _shown(dossier: Dossier, stage: Stage, *, rehearsal: bool) -> Answer:
    about = [(run, told) for run in dossier.runs if (told := _judged(run, stage)) is not None]
    if not about:
        return unknown("no run judges it")
    real = [one for one in about if one[0].label == LABELS[Layer.FLEET]]
    if not real and not rehearsal:
        run = about[-1][0]
        return unknown(f"judged on {run.label.replace('_', ' ')} only, which is a rehearsal", run.source)
    run, told = (real or about)[-1]
    return Answer(told.verdict, f"{told.reason} ({run.label.replace('_', ' ')}, {run.hardware})", told.evidence)


def _judged(run: RunEvidence, stage: Stage) -> Answer | None:
    """By the gates of the run, if they are about this step alone, else by the built-in rule for tiers."""
    verdict = run.verdict
    if verdict is not None and _is_about(run, verdict.candidate, verdict.baseline, stage):
        said = f"`{verdict.candidate}` against `{verdict.baseline}`: gates {verdict.verdict.value}"
        return _answer(verdict.verdict, said, verdict.reasons, run.source)
    for call in run.tier_calls:
        if _is_about(run, call.candidate, call.baseline, stage):
            said = f"`{call.candidate}` against `{call.baseline}`: {call.decision}"
            return _answer(_OUTCOMES[call.decision], said, call.reasons, run.source)
    return None


_OUTCOMES = {"keep": Outcome.PASS, "drop": Outcome.FAIL, "unknown": Outcome.UNKNOWN}


def _answer(outcome: Outcome, said: str, reasons: tuple[str, ...], source: str) -> Answer:
    if outcome is Outcome.PASS:
        return passed(said, source)
    return Answer(outcome, f"{said}: {'; '.join(reasons[:2])}", (source,))


def _is_about(run: RunEvidence, candidate: str, baseline: str, stage: Stage) -> bool:
    """Whether the two differ in this step and in nothing else."""
    left, right = run.arm(candidate), run.arm(baseline)
    if left is None or right is None:
        return False
    if stage is Stage.ROUTER:
        return left.added == right.added and left.policy != right.policy
    return left.policy == right.policy and _beyond(left, right) == {stage.value}


def _beyond(candidate: ArmEvidence, baseline: ArmEvidence) -> set[str]:
    """What the candidate has more; nothing if it also lacks something."""
    lacking = set(baseline.added) - set(candidate.added)
    return set() if lacking else set(candidate.added) - set(baseline.added)
