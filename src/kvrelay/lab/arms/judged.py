"""A run as the gates see it: one value per arm and metric, each with its count, or the reason why there is none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvrelay.core.gates.evidence import Evidence, Hardware, Layer, Registration
from kvrelay.core.gates.judge import Value
from kvrelay.lab.arms.isolation import IsolationState
from kvrelay.lab.arms.manifest import ArmFacts, Manifest
from kvrelay.lab.arms.planned import PlannedRow
from kvrelay.lab.arms.results import ArmData, PolicyResult, hit_ratio, sent_late, successful_sessions
from kvrelay.lab.replay.sending import session_walls

NO_COUNTERS = "not every worker's metrics page says it"


def figures_of(
    result: PolicyResult,
    arms: Sequence[ArmData],
    facts: Sequence[ArmFacts],
    rows: Sequence[PlannedRow],
    baseline: Sequence[ArmData],
) -> dict[str, Value]:
    """Of one policy, all its repeats together. Percentiles are over all planned requests: failed ones come last."""
    ttft_ms = _with_failures([s.ttft_ms for data in arms for s in data.samples if s.ok and s.ttft_ms], result)
    wall_ms = _walls(arms, rows)
    requests = result.requests
    return {
        "ttft_p50_ms": _percentile(ttft_ms, 50),
        "ttft_p95_ms": _percentile(ttft_ms, 95),
        "ttft_p99_ms": _percentile(ttft_ms, 99),
        "itl_p95_ms": _maybe(result.itl_ms.p95, result.itl_ms.count, "no answer has two tokens"),
        "session_wall_p50_ms": _percentile(wall_ms, 50),
        "session_wall_p95_ms": _percentile(wall_ms, 95),
        "successful_tasks_per_s": _maybe(result.tasks.successful_per_s, result.tasks.planned, "no time was measured"),
        "task_success_ratio": _ratio(result.tasks.successful, result.tasks.planned),
        "failed_requests": Value(float(result.failures), requests),
        "failed_ratio": _ratio(result.failures, requests),
        "retries_ratio": _ratio(result.retries, requests),
        "hit_ratio": _maybe(hit_ratio(result), requests, "no answer said what it hit"),
        "claim_error_ratio": _claim_error(arms),
        "recomputed_tokens": _maybe(result.recomputed_tokens, requests, "no answer said what it hit"),
        "max_over_mean_load_ratio": _maybe(result.max_over_mean_load, len(arms), "nobody said who answered"),
        "wrong_context_requests": wrong_context(arms, baseline, facts),
        **_from_counters(arms, facts),
    }


def evidence_of(
    manifest: Manifest,
    results: Mapping[str, PolicyResult],
    registration: Registration,
    unanswered: Sequence[str],
    broken: Sequence[str],
) -> Evidence:
    """`results` are of the policies that are judged: what happened to others proves nothing about these."""
    states = {facts.arm: facts.isolation.state for facts in manifest.observed if facts.policy in results}
    return Evidence(
        layer=Layer(manifest.stated.fleet.layer),
        hardware=_hardware(manifest),
        registration=registration,
        repeats=min((len(result.repeats) for result in results.values()), default=0),
        answered_requests=min((result.ttft_ms.count for result in results.values()), default=0),
        contaminated_arms=[arm for arm, state in states.items() if state is IsolationState.CONTAMINATED],
        unverified_arms=[arm for arm, state in states.items() if state is IsolationState.UNVERIFIED],
        late_arms=[policy for policy, result in results.items() if sent_late(result)],
        unanswered_records=unanswered,
        sameness_broken=broken,
    )


def wrong_context(arms: Sequence[ArmData], baseline: Sequence[ArmData], facts: Sequence[ArmFacts]) -> Value:
    """Answers that cannot come from the right context. Mock workers know; elsewhere answers to the same prompt at
    temperature 0 are compared, where the baseline gave the same one in all its repeats."""
    counted = [counter.wrong_reuse_blocks for one in facts for counter in one.counters.values()]
    if counted and None not in counted:
        return Value(float(sum(value or 0 for value in counted)), sum(len(data.samples) for data in arms))
    if len(baseline) < 2:
        return Value(None, reason="the baseline has no second repeat that would show what its answers are worth")
    answers: dict[tuple[str, int], set[str]] = defaultdict(set)
    for data in baseline:
        for sample in data.samples:
            if sample.answer_digest is not None:
                answers[(sample.session_id, sample.turn)].add(sample.answer_digest)
    firm = {key: next(iter(own)) for key, own in answers.items() if len(own) == 1}
    compared = [
        sample.answer_digest == firm[(sample.session_id, sample.turn)]
        for data in arms
        for sample in data.samples
        if sample.answer_digest is not None and (sample.session_id, sample.turn) in firm
    ]
    if not compared:
        return Value(None, reason="no turn has the same answer in all repeats of the baseline")
    return Value(float(compared.count(False)), len(compared))


def _with_failures(answered_ms: Sequence[float], result: PolicyResult) -> list[float]:
    """Every planned request: those that never had a first token come last, at infinity."""
    return [*answered_ms, *[math.inf] * (result.requests - result.answers_without_content - len(answered_ms))]


def _walls(arms: Sequence[ArmData], rows: Sequence[PlannedRow]) -> list[float]:
    found: list[float] = []
    sessions = len({row.session_id for row in rows})
    for data in arms:
        successful = successful_sessions(data, rows)
        own = [wall.from_due_ms for wall in session_walls(data.samples) if wall.session_id in successful]
        found += [*own, *[math.inf] * (sessions - len(own))]
    return found


def _percentile(values: Sequence[float], percent: int) -> Value:
    """Nearest rank."""
    if not values:
        return Value(None, reason="nothing was planned")
    rank = max(1, -(-len(values) * percent // 100))
    return Value(sorted(values)[rank - 1], len(values))


def _ratio(part: float, whole: int) -> Value:
    return Value(part / whole, whole) if whole else Value(None, reason="nothing was planned")


def _maybe(value: float | None, count: int, reason: str) -> Value:
    return Value(None, reason=reason) if value is None else Value(float(value), count)


def _claim_error(arms: Sequence[ArmData]) -> Value:
    receipts = [data.receipts[s.request_id] for data in arms for s in data.samples if s.request_id in data.receipts]
    known = [
        (abs(one.matched_tokens_at_route - one.actual_cached_tokens), one.eligible_prefix_tokens or 0)
        for one in receipts
        if one.matched_tokens_at_route is not None and one.actual_cached_tokens is not None
    ]
    eligible = sum(tokens for _, tokens in known)
    if not eligible:
        return Value(None, reason="no receipt has both a claim and an outcome")
    return Value(sum(error for error, _ in known) / eligible, len(known))


def _from_counters(arms: Sequence[ArmData], facts: Sequence[ArmFacts]) -> dict[str, Value]:
    counters = [counter for one in facts for counter in one.counters.values()]
    queries, hits = _sum(one.queries_tokens for one in counters), _sum(one.hits_tokens for one in counters)
    answered = [sample.cached_tokens for data in arms for sample in data.samples if sample.ok]
    preemptions = _sum(one.preemptions for one in counters)
    peaks = [one.kv_usage_peak_ratio for one in counters]
    return {
        "engine_hit_ratio": _maybe(hits / queries if hits is not None and queries else None, len(facts), NO_COUNTERS),
        "hits_disagree_ratio": _disagreement(hits, answered),
        "preemptions": _maybe(preemptions, len(facts), NO_COUNTERS),
        "kv_usage_peak_ratio": _maybe(_peak(peaks), len(facts), NO_COUNTERS),
    }


def _disagreement(hits: int | None, answered: Sequence[int | None]) -> Value:
    if hits is None or not answered or None in answered:
        return Value(None, reason="either the counters or the answers do not say what was hit")
    by_request = sum(value or 0 for value in answered)
    larger = max(hits, by_request)
    return Value(abs(hits - by_request) / larger if larger else 0.0, len(answered))


def _peak(peaks: Sequence[float | None]) -> float | None:
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known and len(known) == len(peaks) else None


def _sum(values: Iterable[int | None]) -> int | None:
    """None unless every part is known."""
    known = list(values)
    return None if not known or None in known else sum(value or 0 for value in known)


def _hardware(manifest: Manifest) -> Hardware:
    """As every arm found it, not only as it was before the first one."""
    seen = {process.hardware for facts in manifest.observed for process in facts.processes if process.role == "worker"}
    named = {Hardware(name) for name in (*seen, manifest.stated.fleet.hardware) if name is not None}
    return next(iter(named)) if len(named) == 1 else Hardware.UNKNOWN
