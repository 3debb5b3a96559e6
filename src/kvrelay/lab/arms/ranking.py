"""Who won and why, in two sentences made of the numbers. The rule is stated in the manifest before the first arm."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kvrelay.core.gates.evidence import LABELS, MIN_ANSWERED, MIN_REPEATS, Layer
from kvrelay.lab.arms.results import Figures, PolicyResult, hit_ratio, sent_late

TIE_RATIO = 1.05
RULE = (
    "fewest failures, then the lowest p95 of the time to first token; "
    f"if the next one is within {100 * (TIE_RATIO - 1):.0f} % of it, nobody wins"
)
LOSS_WORDS = {
    "route": "lost because another worker held them",
    "residency": "promised and then evicted before they were used",
    "transfer": "left in another tier",
}


class Ranking(Struct, frozen=True):
    """`winner` is null after a tie, and when nothing can be compared.

    `evidence`: sufficient; insufficient (too little, or a client that sent late: a tendency and no proof); none.
    """

    winner: str | None
    evidence: str
    rule: str
    won: str
    why: str


def rank(results: Mapping[str, PolicyResult], *, label: str) -> Ranking:
    """`label`: what the results may be called; times of mock workers are called modelled."""
    ranked = sorted(results.values(), key=_place)
    if any(result.ttft_ms.p95 is None for result in ranked):
        return _no_verdict("At least one policy has no request that was answered.")
    if len(ranked) < 2:
        return _no_verdict("One policy alone cannot win.")
    best, next_best = ranked[0], ranked[1]
    tied, where = _tied(best, next_best), _where(label)
    winner, won = (None, _tie(best, next_best, where)) if tied else (best.policy, _won(best, next_best, where))
    why = _why(best, ranked[1:])
    doubts = _doubts(ranked)
    if not doubts:
        return Ranking(winner, "sufficient", RULE, won, why)
    caution = f"This is a tendency, not evidence: {' and '.join(doubts)}."
    return Ranking(winner, "insufficient", RULE, won, f"{why} {caution}")


def _doubts(ranked: list[PolicyResult]) -> list[str]:
    """Why the outcome proves nothing; empty when it does."""
    doubts = []
    if min(len(result.repeats) for result in ranked) < MIN_REPEATS:
        doubts.append(f"there were fewer than {MIN_REPEATS} repeats")
    if min(result.ttft_ms.count for result in ranked) < MIN_ANSWERED:
        doubts.append(f"a policy had fewer than {MIN_ANSWERED} answered requests")
    late = [result.policy for result in ranked if sent_late(result)]
    if late:
        doubts.append(f"our own client sent late under {', '.join(late)}")
    return doubts


def _no_verdict(why: str) -> Ranking:
    return Ranking(None, "none", RULE, "No verdict.", why)


def _place(result: PolicyResult) -> tuple[int, float]:
    p95_ms = result.ttft_ms.p95
    return (result.failures, float("inf") if p95_ms is None else p95_ms)


def _where(label: str) -> str:
    return "on these mock workers: modelled" if label == LABELS[Layer.MOCK] else "on this fleet:"


def _tied(best: PolicyResult, next_best: PolicyResult) -> bool:
    assert best.ttft_ms.p95 is not None and next_best.ttft_ms.p95 is not None
    return best.failures == next_best.failures and next_best.ttft_ms.p95 <= TIE_RATIO * best.ttft_ms.p95


def _tie(best: PolicyResult, next_best: PolicyResult, where: str) -> str:
    return (
        f"Nobody won {where} p95 time to first token {best.ttft_ms.p95:,.0f} ms "
        f"({best.policy}) and {next_best.ttft_ms.p95:,.0f} ms ({next_best.policy}) are too close, failures "
        f"{best.failures} each."
    )


def _won(best: PolicyResult, next_best: PolicyResult, where: str) -> str:
    return (
        f"{best.policy} won {where} p95 time to first token {best.ttft_ms.p95:,.0f} ms "
        f"against {next_best.ttft_ms.p95:,.0f} ms ({next_best.policy}), failures {best.failures} "
        f"against {next_best.failures}."
    )


def _why(best: PolicyResult, others: list[PolicyResult]) -> str:
    """Hits and balance are the two reasons there can be; each other policy is named with what it lost where."""
    compared = "; ".join(
        f"{other.policy} {_percent(other)} and {_ratio(other)}, {_biggest_loss(other)}" for other in others
    )
    return (
        f"{best.policy} hit {_percent(best)} of the eligible tokens and its busiest worker had {_ratio(best)} the mean "
        f"load ({compared})."
    )


def _biggest_loss(figures: Figures) -> str:
    """Where its lost tokens went; prompts that nobody had seen before are everybody's loss and explain nothing."""
    losses = {gate: getattr(figures.gate_loss_tokens, gate) for gate in LOSS_WORDS}
    gate = max(losses, key=lambda name: losses[name])
    return f"with {losses[gate]:,} tokens {LOSS_WORDS[gate]}" if losses[gate] else "with no token lost that was held"


def _percent(figures: Figures) -> str:
    ratio = hit_ratio(figures)
    return "an unknown share" if ratio is None else f"{100 * ratio:.0f} %"


def _ratio(figures: Figures) -> str:
    return "an unknown multiple of" if figures.max_over_mean_load is None else f"{figures.max_over_mean_load:.2f}x"
