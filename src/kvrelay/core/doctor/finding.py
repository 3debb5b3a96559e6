"""A rule asks one question of the facts; a finding is its answer for one worker or for the fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

from msgspec import Struct

from kvrelay.core.doctor.facts import Facts, WorkerFacts


class Verdict(StrEnum):
    """Unknown is never ok: it says that the question could not be answered."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not_applicable"


class Judged(Struct, frozen=True):
    """`detail` names what was seen, with values."""

    verdict: Verdict
    detail: str


class Rule(Struct, frozen=True, kw_only=True):
    """One question. `setting` is where the answer is decided; `cause` and `fix` are for answers that are not ok."""

    code: str
    setting: str
    asks: str
    cause: str
    fix: str
    essential: bool = False  # without an answer to this one nobody can say that the fleet is well


class WorkerRule(Rule, frozen=True, kw_only=True):
    """Asked of each worker."""

    judge: Callable[[Facts, WorkerFacts], Judged]


class FleetRule(Rule, frozen=True, kw_only=True):
    """Asked once."""

    judge: Callable[[Facts], Judged]


class Finding(Struct, frozen=True, kw_only=True):
    """One line of the report. `worker` is None for the fleet; only warnings and failures have a `cause` and a `fix`."""

    code: str
    worker: str | None
    setting: str
    verdict: Verdict
    detail: str
    cause: str | None = None
    fix: str | None = None
    essential: bool = False


def examine(facts: Facts, rules: Iterable[WorkerRule | FleetRule]) -> tuple[Finding, ...]:
    """Every rule's answer, worker by worker and then for the fleet."""
    rules = tuple(rules)
    found = [
        _finding(rule, worker.name, rule.judge(facts, worker))
        for worker in facts.workers
        for rule in rules
        if isinstance(rule, WorkerRule)
    ]
    found += [_finding(rule, None, rule.judge(facts)) for rule in rules if isinstance(rule, FleetRule)]
    return tuple(found)


def overall(findings: Iterable[Finding]) -> Verdict:
    """Fail if anything fails, unknown if an essential question has no answer, else ok (with or without warnings)."""
    findings = tuple(findings)
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        return Verdict.FAIL
    if not findings or any(finding.verdict is Verdict.UNKNOWN and finding.essential for finding in findings):
        return Verdict.UNKNOWN
    return Verdict.WARN if any(finding.verdict is Verdict.WARN for finding in findings) else Verdict.OK


def _finding(rule: Rule, worker: str | None, judged: Judged) -> Finding:
    troubled = judged.verdict in (Verdict.WARN, Verdict.FAIL)
    return Finding(
        code=rule.code,
        worker=worker,
        setting=rule.setting,
        verdict=judged.verdict,
        detail=judged.detail,
        cause=rule.cause if troubled else None,
        fix=rule.fix if troubled else None,
        essential=rule.essential,
    )


def ok(detail: str) -> Judged:
    return Judged(Verdict.OK, detail)


def warn(detail: str) -> Judged:
    return Judged(Verdict.WARN, detail)


def fail(detail: str) -> Judged:
    return Judged(Verdict.FAIL, detail)


def unknown(detail: str) -> Judged:
    return Judged(Verdict.UNKNOWN, detail)


def not_applicable(detail: str) -> Judged:
    return Judged(Verdict.NOT_APPLICABLE, detail)
