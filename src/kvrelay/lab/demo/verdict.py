"""Who won and why, in two sentences made of the numbers. The rule is stated in the manifest before the first arm."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kvrelay.lab.demo.results import Figures, PolicyResult

RULE = "fewest failures, then the lowest p95 of the modelled time to first token, then the most actual hit tokens"
MIN_REPEATS = 3
LOSS_WORDS = {
    "route": "lost because another worker held them",
    "residency": "promised and then evicted before they were used",
    "transfer": "left in another tier",
}


class Verdict(Struct, frozen=True):
    """`winner` is null when nothing can be compared; `why` then says what is missing."""

    winner: str | None
    evidence: str  # sufficient | insufficient: fewer repeats than MIN_REPEATS show a tendency and prove nothing
    rule: str
    won: str
    why: str


def judge(results: Mapping[str, PolicyResult]) -> Verdict:
    ranked = sorted(results.values(), key=_rank)
    if any(result.ttft_ms.p95 is None for result in ranked):
        return _no_verdict("At least one policy has no request that was answered.")
    if len(ranked) < 2:
        return _no_verdict("One policy alone cannot win.")
    best, next_best = ranked[0], ranked[1]
    why = _why(best, ranked[1:])
    if min(len(result.repeats) for result in ranked) >= MIN_REPEATS:
        return Verdict(best.policy, "sufficient", RULE, _won(best, next_best), why)
    caution = f" With fewer than {MIN_REPEATS} repeats this is a tendency, not evidence."
    return Verdict(best.policy, "insufficient", RULE, _won(best, next_best), why + caution)


def _no_verdict(why: str) -> Verdict:
    return Verdict(None, "insufficient", RULE, "No verdict.", why)


def hit_ratio(figures: Figures) -> float | None:
    """Actual hits over what could have been hit at all."""
    if figures.actual_cached_tokens is None or not figures.eligible_tokens:
        return None
    return figures.actual_cached_tokens / figures.eligible_tokens


def _rank(result: PolicyResult) -> tuple[float, float, int]:
    p95 = result.ttft_ms.p95
    return (result.failures, float("inf") if p95 is None else p95, -(result.actual_cached_tokens or 0))


def _won(best: PolicyResult, next_best: PolicyResult) -> str:
    return (
        f"{best.policy} won on these mock workers: modelled p95 time to first token {best.ttft_ms.p95:,.0f} ms "
        f"against {next_best.ttft_ms.p95:,.0f} ms ({next_best.policy}), failures {best.failures} "
        f"against {next_best.failures}."
    )


def _why(best: PolicyResult, others: list[PolicyResult]) -> str:
    """Hits and balance are the two reasons there can be; each other policy is named with what it lost where."""
    compared = "; ".join(
        f"{other.policy} {_percent(other)} and {_ratio(other)}, {_biggest_loss(other)}" for other in others
    )
    return (
        f"It hit {_percent(best)} of the eligible tokens and its busiest worker had {_ratio(best)} the mean load "
        f"({compared})."
    )


def _biggest_loss(figures: Figures) -> str:
    """Where its lost tokens went; prompts that nobody had seen before are everybody's loss and explain nothing."""
    losses = {gate: getattr(figures.gate_loss_tokens, gate) for gate in LOSS_WORDS}
    gate = max(losses, key=lambda name: losses[name])
    return f"with {losses[gate]:,} tokens {LOSS_WORDS[gate]}"


def _percent(figures: Figures) -> str:
    ratio = hit_ratio(figures)
    return "an unknown share" if ratio is None else f"{100 * ratio:.0f} %"


def _ratio(figures: Figures) -> str:
    return "an unknown multiple of" if figures.max_over_mean_load is None else f"{figures.max_over_mean_load:.2f}x"
