"""From what was remembered of a request to its receipt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvrelay.core.contract.fingerprint import prefix_fingerprint
from kvrelay.core.load.ledger import FOREIGN, KINDS, QUEUED
from kvrelay.core.model.events import RequestArrived
from kvrelay.core.model.prompt import Usage
from kvrelay.core.model.units import FallbackReason, RouteReason, Status
from kvrelay.core.policy.policy import Row
from kvrelay.core.receipts.attribution import attribute
from kvrelay.core.receipts.receipt import MAX_CANDIDATES, Attempt, Candidate, GateLoss, Receipt
from kvrelay.core.routing.live import Attempted, Decision, Live

_NOTHING: Mapping[str, float] = {}
_FALLBACK_OF_REASON = {
    RouteReason.STICKY_SPILL: FallbackReason.OVERLOADED_HOLDER,
    RouteReason.AFFINITY_BROKEN_LOST: FallbackReason.AFFINITY_BROKEN,
    RouteReason.AFFINITY_BROKEN_BUSY: FallbackReason.AFFINITY_BROKEN,
    RouteReason.AFFINITY_BROKEN_UNHEALTHY: FallbackReason.AFFINITY_BROKEN,
    RouteReason.AFFINITY_BROKEN_UNAVAILABLE: FallbackReason.AFFINITY_BROKEN,
    RouteReason.CACHE_SPILL: FallbackReason.OVERLOADED_HOLDER,
    RouteReason.CACHE_NOT_SCORED: FallbackReason.NOT_SCORED,
    RouteReason.CACHE_INDEX_UNUSABLE: FallbackReason.INDEX_UNUSABLE,
}


def assemble(
    live: Live,
    now: float,
    *,
    policy: str,
    status: Status,
    http_status: int | None,
    failure_reason: str | None,
    usage: Usage,
    itl_ms: tuple[float, ...],
    manifest_digest: str | None,
) -> Receipt:
    """The receipt of a request that just reached its terminal status."""
    arrived, last = live.arrived, live.current
    decision = last.decision if last is not None else None
    reason = decision.choice.reason if decision is not None else RouteReason.NOT_ROUTED
    migrations = sum([attempted.continues for attempted in live.attempts])
    matched = _Matched.of(decision, arrived)
    prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else arrived.prompt.prompt_tokens
    actual = usage.cached_tokens
    return Receipt(
        request_id=arrived.request_id,
        session_id=arrived.session_id,
        tenant=arrived.tenant.name,
        epoch=arrived.epoch,
        path=arrived.path,
        model=arrived.model,
        prefix_fingerprint=_fingerprint(arrived),
        policy=policy if decision is None else decision.policy,
        eligible_prefix_blocks=matched.eligible_blocks,
        eligible_prefix_tokens=matched.eligible_tokens,
        block_size=matched.block_size_tokens,
        chosen_worker=decision.target.worker.name if decision is not None else None,
        incarnation=decision.target.worker.incarnation if decision is not None else None,
        rank=decision.target.rank if decision is not None else None,
        matched_blocks_at_route=matched.blocks,
        matched_tokens_at_route=matched.tokens,
        matched_tiers_at_route=matched.tiers,
        worker_queue_at_route=matched.queue,
        router_queue_ms=round(live.waited_s * 1000, 3) if decision is not None else None,
        load_snapshot=decision.load_version if decision is not None else None,
        route_reason=reason,
        spilled_from=_spilled_from(decision),
        candidates_total=len(decision.field.slots) if decision is not None else 0,
        candidates=_candidates(decision),
        index_state=decision.index_state if decision is not None else None,
        unscored_because=arrived.prompt.unscored_because,
        attempts=tuple([_attempt(live, attempted) for attempted in live.attempts]),
        actual_local_hits=_blocks(actual, matched.block_size_tokens),
        actual_cached_tokens=actual,
        remote_outcome=usage.remote_outcome,
        remote_reason=usage.remote_reason,
        remote_loaded_tokens=usage.remote_loaded_tokens,
        contract_differs=usage.contract_differs,
        remote_bytes_read=usage.remote_bytes_read,
        cached_tokens_by_scope=usage.tokens_by_scope,
        remote_path_ms=usage.remote_path_ms or {},
        gate_loss_tokens=_gate_loss(decision, matched, actual),
        arrived_ms=round(live.arrived_at * 1000, 3),
        deadline_ms=arrived.deadline_ms,
        over_deadline_ms=live.over_deadline_ms,
        ttft_ms=None if live.first_token_at is None else round((live.first_token_at - live.arrived_at) * 1000, 3),
        itl_ms=itl_ms,
        e2e_ms=round((now - live.arrived_at) * 1000, 3),
        decision_us=live.decision_us,
        prompt_tokens=prompt_tokens,
        completion_tokens=usage.completion_tokens,
        status=status,
        http_status=http_status,
        failure_reason=failure_reason,
        fallback_reason=_fallback(live, reason, migrations),
        migrations=migrations,
        not_migrated_because=live.not_migrated_because,
        not_retried_because=live.not_retried_because,
        engine=decision.engine if decision is not None else None,
        models_payload=decision.models_payload if decision is not None else None,
        manifest_digest=manifest_digest,
    )


class _Matched:
    """The chosen worker's row of the decision, or nulls where there is none."""

    block_size_tokens: int | None = None
    eligible_blocks: int | None = None
    eligible_tokens: int | None = None
    tokens: int | None = None
    blocks: int | None = None
    tiers: dict[str, int] | None = None
    queue: int | None = None
    fast_tokens = 0
    lower_tokens = 0

    @classmethod
    def of(cls, decision: Decision | None, arrived: RequestArrived) -> _Matched:
        row = cls()
        if decision is None:
            return row
        row.queue = decision.chosen_load[QUEUED] + decision.chosen_load[FOREIGN]
        target = decision.targets[decision.slot]
        size = target.block_size_tokens if target is not None else 0
        if not size or arrived.prompt.prompt_tokens is None or size not in arrived.prompt.keys:
            return row
        row.block_size_tokens = size
        row.eligible_blocks = len(arrived.prompt.keys[size])
        row.eligible_tokens = row.eligible_blocks * size
        row.tiers = _tiers(decision, decision.slot)
        row.tokens = sum(row.tiers.values())
        row.blocks = row.tokens // size
        row.fast_tokens = row.tiers["gpu"] + row.tiers.get("in_flight", 0)
        row.lower_tokens = row.tokens - row.fast_tokens
        return row


def _gate_loss(decision: Decision | None, matched: _Matched, actual: int | None) -> GateLoss | None:
    if decision is None or decision.matches is None or matched.eligible_tokens is None or actual is None:
        return None
    return attribute(
        eligible_tokens=matched.eligible_tokens,
        best_known_tokens=decision.matches.best(),
        claimed_fast_tokens=matched.fast_tokens,
        claimed_lower_tokens=matched.lower_tokens,
        actual_tokens=actual,
    )


def _candidates(decision: Decision | None) -> tuple[Candidate, ...]:
    """The chosen one first, then the best of the others by score; a policy that does not score has no best others."""
    if decision is None:
        return ()
    return _described(decision, _shown(decision))


def all_candidates(decision: Decision) -> tuple[Candidate, ...]:
    """Every candidate, in order of slots."""
    return _described(decision, range(len(decision.field.slots)))


def _shown(decision: Decision) -> list[int]:
    scores = decision.choice.scores
    if scores is None:
        return [decision.at]
    if isinstance(scores, np.ndarray):
        signed = scores if decision.choice.best_is_lowest else -scores
        order = signed.argsort(kind="stable")[: MAX_CANDIDATES + 1].tolist()
    else:
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=not decision.choice.best_is_lowest)
    others = [at for at in order if at != decision.at]
    return [decision.at, *others[:MAX_CANDIDATES]]


def _described(decision: Decision, shown: Iterable[int]) -> tuple[Candidate, ...]:
    """One loop without helpers: it runs for every candidate of every receipt."""
    field, choice = decision.field, decision.choice
    slots, targets, chosen_at = field.slots, decision.targets, decision.at
    scores, terms_of = choice.scores, choice.terms_of
    candidates = []
    for at in shown:
        slot = slots.item(at)
        target, row = targets[slot], field.row(at)
        assert target is not None
        worker = target.id.worker
        candidates.append(
            Candidate(
                worker.name,
                worker.incarnation,
                target.id.rank,
                _tiers(decision, slot),
                _chosen_load(decision) if at == chosen_at else _NOTHING if row is None else _load(row),
                _NOTHING if terms_of is None or row is None else terms_of(row),
                None if scores is None else float(scores[at]),
                target.hop,
            )
        )
    return tuple(candidates)


def _tiers(decision: Decision, slot: int) -> dict[str, int]:
    if decision.matches is None:
        return {}
    match = decision.matches.at(slot)
    if match.ready == match.fast:
        return {"gpu": match.fast, **match.lower} if match.lower else {"gpu": match.fast}
    return {"gpu": match.fast, "in_flight": match.ready - match.fast, **match.lower}


def _chosen_load(decision: Decision) -> dict[str, float]:
    """Known whatever the policy looked at."""
    load: dict[str, float] = dict(zip(KINDS, decision.chosen_load, strict=True))
    load["prefill_tokens_per_s"] = decision.chosen_rate
    return load


def _load(row: Row) -> dict[str, float]:
    return {
        "active_requests": row.active,
        "queued_requests": row.queued,
        "active_prefill_tokens": row.prefill_tokens,
        "active_decode_blocks": row.decode_blocks,
        "foreign_requests": row.foreign,
        "prefill_tokens_per_s": row.prefill_tokens_per_s,
    }


def _attempt(live: Live, attempted: Attempted) -> Attempt:
    target = attempted.decision.target
    return Attempt(
        attempt=attempted.number,
        worker=target.worker.name,
        incarnation=target.worker.incarnation,
        rank=target.rank,
        reason=attempted.decision.choice.reason,
        started_ms=round((attempted.started_at - live.arrived_at) * 1000, 3),
        fault=attempted.fault,
        http_status=attempted.http_status,
        detail=attempted.detail,
        continued=attempted.continues,
    )


def _spilled_from(decision: Decision | None) -> str | None:
    if decision is None or decision.choice.spilled_from is None:
        return None
    target = decision.targets[decision.choice.spilled_from]
    return target.id.worker.name if target is not None else None


def _fallback(live: Live, reason: RouteReason, migrations: int) -> FallbackReason | None:
    if migrations:
        return FallbackReason.MIGRATED
    if len(live.attempts) > 1:
        return FallbackReason.RETRIED_ELSEWHERE
    if live.current is not None and live.current.last_resort:
        return FallbackReason.LAST_RESORT
    if live.current is not None and live.over_deadline_ms:
        return FallbackReason.DEADLINE
    return _FALLBACK_OF_REASON.get(reason)


def _fingerprint(arrived: RequestArrived) -> str | None:
    """Keyed per tenant, over the last chained key: equal prefixes show, prompts cannot be guessed."""
    for size, keys in arrived.prompt.keys.items():
        if len(keys):
            return "tenant-hmac:" + prefix_fingerprint(arrived.tenant, size, keys.item(-1))
    return None


def _blocks(tokens: int | None, block_size_tokens: int | None) -> int | None:
    return tokens // block_size_tokens if tokens is not None and block_size_tokens else None
