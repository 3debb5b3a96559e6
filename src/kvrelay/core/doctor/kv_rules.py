"""Does the KV connector in a worker do what was declared, and does it go together with its engine?"""

from __future__ import annotations

from kvrelay.core.doctor.facts import Facts, WorkerFacts
from kvrelay.core.doctor.finding import Judged, WorkerRule, fail, not_applicable, ok, unknown, warn
from kvrelay.core.doctor.known import KV_PAIRS, NEVER_TRIED

NO_REPORT = "no `kv_report` is configured for this worker"


def _failure_policy(facts: Facts, worker: WorkerFacts) -> Judged:
    if not worker.reports_kv:
        return not_applicable(NO_REPORT)
    does, declared = worker.load_failure_policy, facts.host.declared_failure_policy
    if does is None:
        return unknown("its KV connector does not say what it does when a load fails")
    if does == declared:
        return ok(f"`{does}`, as declared")
    if declared == "fallback" and does == "recompute":
        return ok("`recompute` after the connector has tried the tiers below, as declared with `fallback`")
    return fail(f"the worker's policy is `{does}`, `store.failure_policy` declares `{declared}`")


def _kv_versions(_: Facts, worker: WorkerFacts) -> Judged:
    if not worker.reports_kv:
        return not_applicable(NO_REPORT)
    if worker.kv_versions is None:
        return unknown("its KV connector does not say its version")
    if worker.engine == "mock":
        return ok(f"kvrelay {worker.kv_versions.get('kvrelay', '?')} in its own mock worker")
    engine = (worker.engine or "", worker.kv_versions.get(worker.engine or "") or worker.version or "?")
    movers = [mover for mover in worker.kv_versions.items() if mover[0] != worker.engine]
    if not movers:
        return unknown("it names no package that moves KV")
    verdicts = {mover: _pair(mover, engine) for mover in movers}
    said = "; ".join(f"{' '.join(mover)} in {' '.join(engine)}: {verdict}" for mover, verdict in verdicts.items())
    return warn(said) if NEVER_TRIED in verdicts.values() else ok(said)


def _pair(mover: tuple[str, str], engine: tuple[str, str]) -> str:
    for pair in KV_PAIRS:
        names_fit = (pair.mover, pair.engine) == (mover[0], engine[0])
        if names_fit and mover[1].startswith(pair.mover_versions) and engine[1].startswith(pair.engine_versions):
            return pair.verdict
    return NEVER_TRIED


KV_RULES = (
    WorkerRule(
        code="load_failure_policy",
        setting="store.failure_policy",
        asks="Does the worker do what was declared when KV cannot be loaded?",
        cause="vLLM's own default is `fail`: a store that is out of reach ends requests instead of costing time.",
        fix="Declare what is meant, or set `kv_load_failure_policy` in the engine's --kv-transfer-config.",
        judge=_failure_policy,
    ),
    WorkerRule(
        code="kv_versions",
        setting="engine",
        asks="Were these versions of engine and KV connector ever held against each other?",
        cause="Connectors reach into an engine's inside, which changes with every release.",
        fix="Use versions that were tried together, or compare loaded with computed output before you rely on it.",
        judge=_kv_versions,
    ),
)
