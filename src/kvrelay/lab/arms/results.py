"""From raw samples and receipts to one figure per question and policy.

Times come from the samples (the client's view), tokens from the receipts (claim and outcome of one decision side by
side). Failed requests stay in the count; they have no times and no tokens to add. What was planned and left no record
is a failure as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from kvrelay.core.gates.evidence import LATE_SENDER_MS
from kvrelay.core.receipts.receipt import GateLoss, Receipt
from kvrelay.core.stats.balance import max_over_mean
from kvrelay.core.stats.distribution import Distribution, distribution
from kvrelay.lab.arms.planned import PlannedRow
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sending import session_walls


class ArmData(Struct, frozen=True, eq=False):
    """All that was recorded of one arm; the primer is in the receipts and not in the samples.

    `seen_tokens`: of every request, what an earlier prompt of the arm had contained. `replay_s`: first due to last end.
    """

    arm: Arm
    workers: tuple[str, ...]
    samples: tuple[Sample, ...]
    receipts: Mapping[str, Receipt]
    seen_tokens: Mapping[str, int]
    replay_s: float


class Tasks(Struct, frozen=True):
    """A task is a session; it succeeded when all its turns were answered. Per second of replay."""

    planned: int
    successful: int
    successful_per_s: float | None


class Figures(Struct, frozen=True, kw_only=True):
    """One arm, or all repeats of a policy pooled. Token sums cover the requests whose engine reported usage."""

    requests: int  # planned ones
    failures: int  # not answered to their end, or without any record
    unrecorded_requests: int
    answers_without_content: int  # answered, but with no token: they have no time to first token
    retries: int  # attempts beyond the first
    tasks: Tasks
    ttft_ms: Distribution  # from when the request was due
    ttft_sent_ms: Distribution  # from when it left the client
    send_lag_ms: Distribution  # how late our own client was
    itl_ms: Distribution
    session_wall_ms: Distribution
    prompt_tokens: int
    eligible_tokens: int
    claimed_tokens: int
    actual_cached_tokens: int | None
    seen_before_tokens: int
    recomputed_tokens: int | None  # seen before in this arm and computed again
    gate_loss_tokens: GateLoss
    requests_without_usage: int  # their hits are unknown, not 0
    unreconciled_requests: int  # hits + gate losses did not add up to the eligible tokens
    usage_disagreements: int  # the receipt and the client read different hit counts
    max_over_mean_load: float | None  # mean requests in flight: busiest worker against the mean of all


class PolicyResult(Figures, frozen=True, kw_only=True):
    """Pooled over the repeats; `max_over_mean_load` is the mean of the repeats', each of which has a new fleet."""

    policy: str
    repeats: tuple[Figures, ...]


def policy_results(arms: Sequence[ArmData], rows: Sequence[PlannedRow]) -> dict[str, PolicyResult]:
    """In the order in which the policies first ran."""
    by_policy: dict[str, list[ArmData]] = defaultdict(list)
    for data in arms:
        by_policy[data.arm.policy].append(data)
    return {policy: _policy_result(policy, own, rows) for policy, own in by_policy.items()}


def _policy_result(policy: str, arms: list[ArmData], rows: Sequence[PlannedRow]) -> PolicyResult:
    repeats = tuple(_figures([data], rows) for data in arms)
    ratios = [repeat.max_over_mean_load for repeat in repeats if repeat.max_over_mean_load is not None]
    pooled = _figures(arms, rows)
    fields = {name: getattr(pooled, name) for name in Figures.__struct_fields__}
    fields["max_over_mean_load"] = round(sum(ratios) / len(ratios), 3) if ratios else None
    return PolicyResult(policy=policy, repeats=repeats, **fields)


def _figures(arms: Sequence[ArmData], rows: Sequence[PlannedRow]) -> Figures:
    samples = [sample for data in arms for sample in data.samples]
    known = [
        (sample, receipt, data.seen_tokens[sample.request_id])
        for data in arms
        for sample in data.samples
        if (receipt := data.receipts.get(sample.request_id)) is not None and receipt.actual_cached_tokens is not None
    ]
    hits = [(receipt.actual_cached_tokens or 0) for _, receipt, _ in known]
    planned, missing = len(rows) * len(arms), sum(len(unrecorded(data, rows)) for data in arms)
    return Figures(
        requests=planned,
        failures=sum(not sample.ok for sample in samples) + missing,
        unrecorded_requests=missing,
        answers_without_content=sum(sample.without_content for sample in samples),
        retries=sum(max(0, len(receipt.attempts) - 1) for data in arms for receipt in _measured(data)),
        tasks=_tasks(arms, rows),
        ttft_ms=distribution([sample.ttft_ms for sample in samples if sample.ttft_ms is not None]),
        ttft_sent_ms=distribution([sample.ttft_sent_ms for sample in samples if sample.ttft_sent_ms is not None]),
        send_lag_ms=distribution([sample.skew_ms for sample in samples]),
        itl_ms=distribution([gap_ms for sample in samples for gap_ms in sample.itl_ms]),
        session_wall_ms=distribution([wall.from_due_ms for data in arms for wall in session_walls(data.samples)]),
        prompt_tokens=sum(receipt.prompt_tokens or 0 for _, receipt, _ in known),
        eligible_tokens=sum(receipt.eligible_prefix_tokens or 0 for _, receipt, _ in known),
        claimed_tokens=sum(receipt.matched_tokens_at_route or 0 for _, receipt, _ in known),
        actual_cached_tokens=sum(hits) if known else None,
        seen_before_tokens=sum(tokens for _, _, tokens in known),
        recomputed_tokens=sum(max(0, tokens - hit) for (_, _, tokens), hit in zip(known, hits, strict=True))
        if known
        else None,
        gate_loss_tokens=_gate_loss(receipt for _, receipt, _ in known),
        requests_without_usage=planned - len(known),
        unreconciled_requests=sum(not _adds_up(receipt) for _, receipt, _ in known),
        usage_disagreements=sum(s.cached_tokens != r.actual_cached_tokens for s, r, _ in known if s.ok),
        max_over_mean_load=max_over_mean(busy_ms(arms[0])) if len(arms) == 1 else None,
    )


def unrecorded(data: ArmData, rows: Sequence[PlannedRow]) -> tuple[tuple[str, int], ...]:
    """Planned turns of which the arm has no sample: whoever took them out, they count as failed."""
    there = {(sample.session_id, sample.turn) for sample in data.samples}
    return tuple(key for row in rows if (key := (row.session_id, row.turn)) not in there)


def successful_sessions(data: ArmData, rows: Sequence[PlannedRow]) -> frozenset[str]:
    """Those all of whose planned turns were answered to their end."""
    answered = {(sample.session_id, sample.turn) for sample in data.samples if sample.ok}
    failed = {row.session_id for row in rows if (row.session_id, row.turn) not in answered}
    return frozenset(row.session_id for row in rows) - failed


def _tasks(arms: Sequence[ArmData], rows: Sequence[PlannedRow]) -> Tasks:
    successful = sum(len(successful_sessions(data, rows)) for data in arms)
    seconds = sum(data.replay_s for data in arms)
    return Tasks(
        planned=len({row.session_id for row in rows}) * len(arms),
        successful=successful,
        successful_per_s=round(successful / seconds, 4) if seconds > 0 else None,
    )


def _measured(data: ArmData) -> Iterable[Receipt]:
    """Receipts of the replay, without the primer's."""
    return (receipt for sample in data.samples if (receipt := data.receipts.get(sample.request_id)) is not None)


def sent_late(figures: Figures) -> bool:
    """Whether our own client was a bottleneck."""
    return (figures.send_lag_ms.p99 or 0.0) > LATE_SENDER_MS


def hit_ratio(figures: Figures) -> float | None:
    """Actual hits over what could have been hit at all."""
    if figures.actual_cached_tokens is None or not figures.eligible_tokens:
        return None
    return figures.actual_cached_tokens / figures.eligible_tokens


def busy_ms(data: ArmData) -> dict[str, float]:
    """Request-milliseconds in flight per worker: over the length of the arm it is the mean number in flight."""
    busy = dict.fromkeys(data.workers, 0.0)
    for sample in data.samples:
        if sample.worker in busy:
            busy[sample.worker] += sample.ended_ms - sample.sent_ms
    return busy


def _gate_loss(receipts: Iterable[Receipt]) -> GateLoss:
    losses = [receipt.gate_loss_tokens for receipt in receipts if receipt.gate_loss_tokens is not None]
    return GateLoss(*(sum(getattr(loss, gate) for loss in losses) for gate in GateLoss.__struct_fields__))


def _adds_up(receipt: Receipt) -> bool:
    if receipt.gate_loss_tokens is None:
        return False
    return receipt.gate_loss_tokens.total + (receipt.actual_cached_tokens or 0) == receipt.eligible_prefix_tokens
