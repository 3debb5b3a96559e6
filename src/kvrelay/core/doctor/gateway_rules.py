"""What does a running gateway see?"""

from __future__ import annotations

from kvrelay.core.doctor.facts import Facts, RouterWorkerFacts, WorkerFacts
from kvrelay.core.doctor.finding import FleetRule, Judged, WorkerRule, fail, not_applicable, ok, warn

RESYNCS_WARN = 3


def _router(facts: Facts) -> Judged:
    if facts.router is None:
        return not_applicable("no gateway was named")
    if facts.router.problem is not None:
        return fail(facts.router.problem)
    lost = [worker.name for worker in facts.router.workers if not worker.routable]
    if lost:
        return fail(f"{facts.router.url} routes nothing to {', '.join(lost)}")
    return ok(f"{len(facts.router.workers)} workers routable")


def _believed(facts: Facts, worker: WorkerFacts) -> RouterWorkerFacts | None:
    if facts.router is None:
        return None
    return next((believed for believed in facts.router.workers if believed.name == worker.name), None)


def _index(facts: Facts, worker: WorkerFacts) -> Judged:
    believed = _believed(facts, worker)
    if believed is None:
        return not_applicable("no gateway was asked about it")
    match believed.index_state:
        case "unusable":
            return fail(believed.index_problem or "unusable")
        case "incomplete":
            return warn("incomplete: the gateway knows that it misses a part")
        case state:
            return ok(state)


def _drift(facts: Facts, worker: WorkerFacts) -> Judged:
    believed = _believed(facts, worker)
    if believed is None:
        return not_applicable("no gateway was asked about it")
    counted = (
        f"{believed.compared} requests compared, {believed.over_claims} over-claimed, "
        f"{believed.under_claims} under-claimed, {believed.resyncs} resyncs"
    )
    if believed.malformed_events:
        return fail(f"{believed.malformed_events} malformed event messages")
    if believed.orphan_blocks:
        return warn(f"{believed.orphan_blocks} blocks wait for parents that nobody announced; {counted}")
    if not believed.compared:
        return not_applicable("no request could be compared yet")
    return warn(counted) if believed.resyncs >= RESYNCS_WARN else ok(counted)


GATEWAY_RULES = (
    FleetRule(
        code="router",
        setting="--router",
        asks="Does the gateway answer, and does it route to all its workers?",
        cause="Workers are down or draining, or the URL is not that of an admin port.",
        fix="Look at /admin/workers; the admin port is 8001 unless set otherwise.",
        judge=_router,
    ),
    WorkerRule(
        code="index",
        setting="events",
        asks="What does the gateway say of its index of this worker?",
        cause="Events do not reach the gateway, or a part of them was lost and could not be replayed.",
        fix="Compare with the findings about events; POST /admin/workers/NAME/resync rebuilds what can be replayed.",
        judge=_index,
    ),
    WorkerRule(
        code="drift",
        setting="index",
        asks="Do claims come true at this worker?",
        cause="Events get lost again and again, or prompts are read differently here and there.",
        fix="Look at the findings about events, tokenizer and template; receipts show the requests.",
        judge=_drift,
    ),
)
