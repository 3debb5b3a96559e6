"""Before anything clever goes live: six questions about what was tried, in which order, and on what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvrelay.core.checklist.dossier import ADDED, ArmEvidence, Dossier, RunEvidence
from kvrelay.core.checklist.item import Answer, Item, all_of, distinct, failed, passed, unknown
from kvrelay.core.gates.evidence import LABELS, Hardware, Layer
from kvrelay.core.gates.judge import Outcome

STAGE = "beginner"
POLICIES = ("round_robin", "sticky", "cache_load")
SIMPLE = frozenset(("round_robin", "random"))
"""Policies that need no proof: they are what others are compared with."""

FIVE: dict[str, tuple[str, ...]] = {
    "worker loss": ("worker-loss",),
    "hot-prefix skew": ("hot-prefix",),
    "event gap": ("gap-inner",),
    "remote tier out of reach": ("store-outage",),
    "stale session and namespace rotation": ("stale-session", "rotation-revision"),
}
"""Of each of the five, the drills that have to pass."""


def _mock_then_one(dossier: Dossier) -> Answer:
    return all_of((_on_mock(dossier.runs), _on_one_worker(dossier.runs)))


def _on_mock(runs: Sequence[RunEvidence]) -> Answer:
    mocks = [run for run in runs if run.label == LABELS[Layer.MOCK]]
    good = [run for run in mocks if run.arms and not _failures(run)]
    if good:
        return passed(f"mock workers: {_requests(good[-1])} requests, none failed", good[-1].source)
    if mocks:
        run = mocks[-1]
        return failed(f"mock workers: {_failures(run)} of {_requests(run)} requests failed", run.source)
    return unknown("mock workers: no run")


def _on_one_worker(runs: Sequence[RunEvidence]) -> Answer:
    found = [run for run in runs if run.label == LABELS[Layer.ONE_WORKER]]
    on_gpu = [run for run in found if run.hardware == Hardware.GPU]
    shared = [(run, max((arm.cached_tokens or 0 for arm in run.arms), default=0)) for run in on_gpu or found]
    if not shared:
        return unknown("one worker: no run")
    run, tokens = max(shared, key=lambda one: one[1])
    said = f"one worker ({run.hardware}): {tokens:,} prompt tokens were hit"
    if not tokens:
        return failed(f"{said}; this trace shares nothing that a cache could keep", run.source)
    if not on_gpu:
        return unknown(f"{said}; a GPU has not shown it yet", run.source)
    return passed(said, run.source)


def _isolated(dossier: Dossier) -> Answer:
    wanted = set(POLICIES)
    found = [run for run in dossier.runs if wanted <= {arm.policy for arm in run.arms}]
    if not found:
        return unknown(f"no run has {', '.join(POLICIES)} as arms")
    clean = [run for run in found if not run.problems]
    if not clean:
        run = found[-1]
        return failed("; ".join(run.problems[:3]), run.source)
    run = clean[-1]
    said = f"{len(run.arms)} arms of one trace, {run.repeats} repeats each, manifest {run.digest[:12]}"
    return passed(said, run.source)


def _one_at_a_time(dossier: Dossier) -> Answer:
    crowded = [(run, step) for run in dossier.runs for step in _steps(run) if len(step) > 1]
    if crowded:
        run, step = crowded[0]
        return failed(f"two neighbouring arms differ in {' and '.join(step)} at once", run.source)
    deployed = _deployed(dossier)
    if not deployed:
        return passed("nothing is added beyond the router", *dossier.deployment.sources)
    return all_of([_step_was_run(dossier, added) for added in deployed])


def _step_was_run(dossier: Dossier, added: str) -> Answer:
    for run in reversed(dossier.runs):
        if (added,) in _steps(run):
            return passed(f"{added}: compared on its own", run.source)
    return unknown(f"{added}: configured, and no run adds it alone", *dossier.deployment.sources)


def _deployed(dossier: Dossier) -> tuple[str, ...]:
    tiers = {"cpu" if tier.medium == "cpu" else "remote" for tier in dossier.deployment.tiers}
    split = {"split"} if {"prefill", "decode"} & set(dossier.deployment.roles) else set()
    return tuple(name for name in ADDED if name in tiers | split)


def _steps(run: RunEvidence) -> list[tuple[str, ...]]:
    """What each arm has beyond the one before it, or lacks; empty steps are left out."""
    found = []
    for left, right in pairwise(run.arms):
        changed = set(left.added) ^ set(right.added)
        if changed:
            found.append(tuple(name for name in ADDED if name in changed))
    return found


def _six_signals(dossier: Dossier) -> Answer:
    if not dossier.runs:
        return unknown("no run")
    missing = {run.source: _missing(run) for run in dossier.runs}
    source = min(missing, key=lambda name: len(missing[name]))
    if missing[source]:
        return unknown(f"not recorded: {', '.join(missing[source])}", source)
    return passed("cache, queue, TTFT, transfer, errors and task completion are in one run", source)


def _missing(run: RunEvidence) -> list[str]:
    """A signal counts as there when every arm has it. Without a shared tier nothing is transferred, which is known."""

    def lacking(has: Iterable[bool]) -> bool:
        return not all(has) or not run.arms

    signals = {
        "cache": lacking(arm.cached_tokens is not None for arm in run.arms),
        "queue": lacking(arm.queue_known for arm in run.arms),
        "TTFT": lacking(arm.ttft_count > 0 for arm in run.arms),
        "transfer": lacking(arm.transferred_bytes is not None or not arm.added for arm in run.arms),
        "errors": lacking(arm.requests > 0 for arm in run.arms),
        "task completion": lacking(arm.tasks_planned > 0 for arm in run.arms),
    }
    return [name for name, is_missing in signals.items() if is_missing]


def _five_drills(dossier: Dossier) -> Answer:
    return all_of([_drilled(dossier, what, names) for what, names in FIVE.items()])


def _drilled(dossier: Dossier, what: str, names: tuple[str, ...]) -> Answer:
    found = dossier.drilled(*names)
    sources = distinct([drill.source] for drill in found)
    broken = [drill for drill in found if drill.verdict == Outcome.FAIL]
    if broken:
        why = "; ".join(broken[0].broken[:2]) or "see its page"
        return failed(f"{what}: {broken[0].drill} failed ({why})", *sources)
    absent = [name for name in names if not any(drill.drill == name and drill.verdict == "pass" for drill in found)]
    if absent:
        return unknown(f"{what}: {', '.join(absent)} has not passed", *sources)
    fleets = {drill.drill: drill.fleet for drill in found if drill.verdict == "pass" and drill.fleet == "attached"}
    if len(fleets) < len(names):
        rehearsed = ", ".join(sorted({drill.fleet for drill in found if drill.drill not in fleets}))
        return unknown(f"{what}: rehearsed on a {rehearsed} fleet, not yet on staging", *sources)
    return passed(f"{what}: passed on staging", *sources)


def _gpu_before_clever(dossier: Dossier) -> Answer:
    policy = dossier.deployment.policy
    if policy in SIMPLE:
        return passed(f"the policy is `{policy}`, the simple one", *dossier.deployment.sources)
    about = [(run, arm) for run in dossier.runs if (arm := _candidate(run)) is not None and arm.policy == policy]
    judged = [run for run, _ in about if run.verdict is not None]
    if not judged:
        return unknown(f"`{policy}` is configured, and no run judges it by gates", *dossier.deployment.sources)
    promotable = [run for run in judged if run.verdict is not None and run.verdict.promotion == "promotable"]
    if promotable:
        return passed(f"`{policy}` kept its gates on GPUs", promotable[-1].source)
    run = judged[-1]
    assert run.verdict is not None
    said = f"`{policy}` is configured: {run.verdict.verdict.value}, {run.verdict.promotion_reason}"
    return failed(said, run.source) if run.verdict.verdict is Outcome.FAIL else unknown(said, run.source)


def _candidate(run: RunEvidence) -> ArmEvidence | None:
    return None if run.verdict is None else run.arm(run.verdict.candidate)


def _failures(run: RunEvidence) -> int:
    return sum(arm.failures for arm in run.arms)


def _requests(run: RunEvidence) -> int:
    return sum(arm.requests for arm in run.arms)


BEGINNER = (
    Item(
        code="mock_then_one_gpu",
        stage=STAGE,
        asks="Was the topology tried on mock workers, and did one GPU show that the trace has common prefixes?",
        todo="kvrelay demo; then kvrelay replay TRACE --fleet FILE with the one worker in FILE.",
        judge=_mock_then_one,
    ),
    Item(
        code="policies_isolated",
        stage=STAGE,
        asks="Were round robin, sticky and cache+load run isolated, on one trace, from one fixed manifest?",
        todo="kvrelay replay TRACE --policy round_robin --policy sticky --policy cache_load --fleet FILE",
        judge=_isolated,
    ),
    Item(
        code="one_at_a_time",
        stage=STAGE,
        asks="Was only one of CPU tier, remote tier and prefill/decode split added at a time?",
        todo="kvrelay plan make tiers writes the arms GPU, GPU+CPU, GPU+CPU+remote; replay them.",
        judge=_one_at_a_time,
    ),
    Item(
        code="six_signals",
        stage=STAGE,
        asks="Are cache, queue, TTFT, transfer, errors and task completion read together?",
        todo="Let workers report usage (vLLM: --enable-prompt-tokens-details) and, with a store, `workers.kv_report`.",
        judge=_six_signals,
    ),
    Item(
        code="five_drills",
        stage=STAGE,
        asks="Did worker loss, hot skew, event gap, remote outage and namespace rotation pass as drills?",
        todo="kvrelay drill run all --fleet FILE --out drills (rehearse with --fleet mock).",
        judge=_five_drills,
    ),
    Item(
        code="gpu_before_clever",
        stage=STAGE,
        asks="Did real GPUs keep the gates written beforehand before a complex policy replaced a simple one?",
        todo="kvrelay gates lock GATES, then kvrelay replay TRACE --gates GATES --fleet FILE; until then round_robin.",
        judge=_gpu_before_clever,
    ),
)
