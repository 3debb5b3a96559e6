"""Snapshots of the router's parts as plain values."""

from __future__ import annotations

from kvrelay.core.index.drift import Drift, DriftKind
from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.events import RequestArrived
from kvrelay.core.model.units import IndexState
from kvrelay.core.routing.assemble import all_candidates
from kvrelay.core.routing.epochs import EpochState
from kvrelay.core.routing.fleet import FleetView, Target, Worker
from kvrelay.core.routing.keeper import EventCounts, Keeper
from kvrelay.core.routing.live import Decision
from kvrelay.core.routing.status import (
    DriftStatus,
    MatchAnswer,
    MatchCandidate,
    RouterStatus,
    TargetStatus,
    WorkerStatus,
)

_MAX_NAMED = 8  # workers in a sentence


def describe(
    now: float,
    *,
    policy: str,
    needs_match: bool,
    scorer: str | None,
    fleet: FleetView,
    keeper: Keeper,
    ledger: Ledger,
    live_requests: int,
    queue_depth: int,
    sessions: int,
    spills: int,
    late_events: int,
    epochs: EpochState,
) -> RouterStatus:
    """The whole router at one moment."""
    return RouterStatus(
        policy=policy,
        scorer=scorer,
        index_problem=_index_problem(fleet) if needs_match else None,
        live_requests=live_requests,
        queue_depth=queue_depth,
        sessions=sessions,
        in_flight_prompts=len(keeper.in_flight),
        index_blocks=keeper.residency.size(),
        spills=spills,
        late_events=late_events,
        epochs=epochs,
        workers=tuple(_worker(now, worker, keeper, ledger) for worker in fleet.workers.values()),
    )


def _index_problem(fleet: FleetView) -> str | None:
    targets = [target for target in fleet.targets if target is not None]
    if not targets or any(target.index_state is not IndexState.UNUSABLE for target in targets):
        return None
    return "nothing can match: " + "; ".join(
        f"{target.id.worker.name}: {target.index_broken}" for target in targets[:_MAX_NAMED]
    )


def _worker(now: float, worker: Worker, keeper: Keeper, ledger: Ledger) -> WorkerStatus:
    spec = worker.spec
    return WorkerStatus(
        name=worker.id.name,
        incarnation=worker.id.incarnation,
        url=spec.url,
        engine=spec.engine,
        models=spec.models,
        adapters=spec.adapters,
        role=spec.role,
        up=worker.health.up,
        routable=worker.health.routable(now) and not worker.leaving,
        standing=worker.health.standing(now).value,
        draining=worker.draining,
        retired=worker.retired,
        targets=tuple(_target(target, keeper, ledger) for target in worker.targets),
        events=_counts(keeper.counts[worker.id.name]),
    )


def _target(target: Target, keeper: Keeper, ledger: Ledger) -> TargetStatus:
    slot = target.slot
    load = ledger.slots[slot]
    running, waiting, kv_usage = load.reported
    return TargetStatus(
        rank=target.id.rank,
        block_size=target.block_size_tokens or None,
        index_state=target.index_state,
        index_problem=target.index_broken,
        index_blocks={tier.value: count for tier, count in keeper.residency.blocks(slot).items()},
        orphan_blocks=keeper.residency.orphans(slot),
        active_requests=load.active_requests,
        queued_requests=load.queued_requests,
        active_prefill_tokens=load.active_prefill_tokens,
        active_decode_blocks=load.active_decode_blocks,
        foreign_requests=load.foreign_requests,
        reported_running=running,
        reported_waiting=waiting,
        reported_kv_usage_ratio=kv_usage,
        prefill_tokens_per_s=ledger.rates.learned(slot),
        prefill_rate_samples=ledger.rates.samples(slot),
        next_event_seq=target.sequence.next_seq if target.sequence is not None else None,
        drift=None if target.drift is None else _drift(target.drift),
    )


def _drift(drift: Drift) -> DriftStatus:
    return DriftStatus(
        compared=drift.compared,
        over_claim=drift.drifted[DriftKind.OVER_CLAIM],
        under_claim=drift.drifted[DriftKind.UNDER_CLAIM],
        resyncs=drift.remedies,
    )


def _counts(counts: EventCounts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in EventCounts.__slots__}


def answer_match(arrived: RequestArrived, decision: Decision | None, reason: str) -> MatchAnswer:
    """The answer to a what-if question; every candidate is shown, not only the best."""
    candidates = all_candidates(decision) if decision is not None else ()
    return MatchAnswer(
        chosen=decision.target.worker.name if decision is not None else None,
        reason=str(reason),
        prompt_tokens=arrived.prompt.prompt_tokens,
        unscored_because=arrived.prompt.unscored_because,
        candidates=tuple(
            MatchCandidate(
                worker=candidate.worker,
                incarnation=candidate.incarnation,
                rank=candidate.rank,
                matched_tokens=sum(candidate.matched_tokens.values()),
                tiers=candidate.matched_tokens,
                load=candidate.load,
                terms=candidate.terms,
                score=candidate.score,
            )
            for candidate in candidates
        ),
    )
