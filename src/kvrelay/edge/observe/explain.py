"""A receipt told in words: where the request went and why, what was claimed and what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kvrelay.core.model.units import RouteReason
from kvrelay.core.receipts.receipt import Attempt, Candidate, Receipt
from kvrelay.core.receipts.reconcile import stale_index_tokens

REASONS: dict[RouteReason, str] = {
    RouteReason.ROUND_ROBIN: "it was the next one in turn",
    RouteReason.RANDOM: "it was drawn at random",
    RouteReason.LEAST_LOAD: "it had the least load",
    RouteReason.STICKY_FIRST: "the session was new and it was the next one in turn",
    RouteReason.STICKY_BOUND: "the session is bound to it",
    RouteReason.STICKY_NO_SESSION: "the request named no session and it was the next one in turn",
    RouteReason.AFFINITY_BROKEN_UNHEALTHY: "the worker that the session was bound to is not healthy",
    RouteReason.AFFINITY_BROKEN_UNAVAILABLE: "the worker that the session was bound to could not take it",
    RouteReason.CACHE_PLUS_LOAD: "cache and load together spoke for it",
    RouteReason.CACHE_SPILL: "the worker with the better cache was too busy",
    RouteReason.CACHE_NO_MATCH: "nobody held any of the prompt, so load decided",
    RouteReason.CACHE_NOT_SCORED: "the prompt could not be matched, so load decided",
    RouteReason.CACHE_INDEX_UNUSABLE: "no worker's index could match anything, so load decided",
    RouteReason.TIE_BREAK: "several were equally good, and load or the draw broke the tie",
    RouteReason.ONLY_CANDIDATE: "it was the only candidate",
    RouteReason.NOT_ROUTED: "no worker could take it",
}
SUM_TOLERANCE = 1e-6


def explain(receipt: Receipt) -> str:
    """Several lines of plain text, without colour and without a final newline."""
    parts = (
        _headline(receipt),
        _prompt(receipt),
        _claim_and_actual(receipt),
        _candidates(receipt),
        _losses(receipt),
        _attempts(receipt.attempts),
        _times(receipt),
        _identity(receipt),
    )
    return "\n".join(printable(line) for part in parts for line in part)


def printable(text: str) -> str:
    """One line that cannot steer a terminal: ids and names in receipts come from clients."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def terms_add_up(candidate: Candidate) -> bool:
    """Whether the terms of a candidate sum to its score; true for one that was not scored."""
    if candidate.score is None:
        return not candidate.terms
    total = math.fsum(candidate.terms.values())
    return math.isclose(total, candidate.score, rel_tol=SUM_TOLERANCE, abs_tol=SUM_TOLERANCE)


def _headline(receipt: Receipt) -> Iterable[str]:
    session = f"session {receipt.session_id}" if receipt.session_id else "no session"
    yield f"Request {receipt.request_id} ({session}, tenant {receipt.tenant}) for {receipt.path}: {_outcome(receipt)}."
    why = REASONS[receipt.route_reason]
    if receipt.chosen_worker is None:
        yield f"  It went to no worker: {why} ({receipt.route_reason})."
        return
    where = f"{receipt.chosen_worker}{_rank(receipt.rank)}"
    yield f"  Policy {receipt.policy} sent it to {where}, because {why} ({receipt.route_reason})."
    if receipt.models_payload is False:
        yield "  That worker is a mock: no KV tensor and no real latency stand behind its answers."
    if receipt.spilled_from:
        yield f"  The better cache was on {receipt.spilled_from}."
    if receipt.fallback_reason:
        yield f"  This was not its first choice: {receipt.fallback_reason}."


def _outcome(receipt: Receipt) -> str:
    status = str(receipt.status)
    if receipt.http_status is not None:
        status += f", HTTP {receipt.http_status}"
    return f"{status}, {receipt.failure_reason}" if receipt.failure_reason else status


def _prompt(receipt: Receipt) -> Iterable[str]:
    if receipt.unscored_because:
        yield f"  The prompt was not matched against the index: {receipt.unscored_because}."
    yield (
        f"  Prompt {_known(receipt.prompt_tokens, 'tokens')}, of which"
        f" {_known(receipt.eligible_prefix_tokens, 'tokens')}"
        f" ({_known(receipt.eligible_prefix_blocks, 'full blocks')}) could come from a cache;"
        f" answer {_known(receipt.completion_tokens, 'tokens')}."
    )


def _claim_and_actual(receipt: Receipt) -> Iterable[str]:
    tiers = ", ".join(f"{tier} {tokens}" for tier, tokens in (receipt.matched_tiers_at_route or {}).items() if tokens)
    state = f", index {receipt.index_state}" if receipt.index_state else ""
    yield (
        f"  Claimed when routing: {_known(receipt.matched_blocks_at_route, 'blocks')},"
        f" {_known(receipt.matched_tokens_at_route, 'tokens')}{f' ({tiers})' if tiers else ''}{state}."
    )
    yield (
        f"  Hit according to the engine: {_known(receipt.actual_local_hits, 'blocks')},"
        f" {_known(receipt.actual_cached_tokens, 'tokens')}. {_difference(receipt)}"
    )


def _difference(receipt: Receipt) -> str:
    stale = stale_index_tokens(receipt)
    if stale is None:
        return "The two cannot be compared."
    if stale == 0:
        return "The claim was exact."
    return f"The index claimed {stale} tokens too many." if stale > 0 else f"The index missed {-stale} tokens."


def _candidates(receipt: Receipt) -> Iterable[str]:
    if not receipt.candidates:
        return
    shown = f"{len(receipt.candidates)} of {receipt.candidates_total}"
    yield f"  Candidates ({shown}; {_order(receipt.candidates)}):"
    for candidate in receipt.candidates:
        chosen = (candidate.worker, candidate.incarnation, candidate.rank) == (
            receipt.chosen_worker,
            receipt.incarnation,
            receipt.rank,
        )
        yield f"    {'->' if chosen else '  '} {candidate.worker}{_rank(candidate.rank)}{_arithmetic(candidate)}"
        yield f"         {_matched_and_load(candidate)}"


def _order(candidates: tuple[Candidate, ...]) -> str:
    names = [name for candidate in candidates for name in candidate.terms]
    if not names:
        return "this policy does not score"
    return "score in ms, lowest is best" if all(name.endswith("_ms") for name in names) else "highest score is best"


def _rank(rank: int | None) -> str:
    return f", rank {rank}" if rank else ""


def _arithmetic(candidate: Candidate) -> str:
    if candidate.score is None:
        return ""
    terms = " ".join(_signed(name, value) for name, value in candidate.terms.items()).removeprefix("+ ")
    doubt = "" if terms_add_up(candidate) else f" (the terms sum to {_number(math.fsum(candidate.terms.values()))}!)"
    return f": {terms} = {_number(candidate.score)}{doubt}"


def _matched_and_load(candidate: Candidate) -> str:
    matched = ", ".join(f"{tier} {tokens}" for tier, tokens in candidate.matched_tokens.items() if tokens)
    load = ", ".join(f"{name} {_number(value)}" for name, value in candidate.load.items() if value)
    return f"matched tokens: {matched or 'none'}; load: {load or 'none'}"


def _signed(name: str, value: float) -> str:
    return f"{'-' if value < 0 else '+'} {_number(abs(value))} {name}"


def _losses(receipt: Receipt) -> Iterable[str]:
    loss = receipt.gate_loss_tokens
    if loss is None:
        return
    gates: Mapping[str, int] = {
        "nobody held them (prefix)": loss.prefix,
        "another worker held them (route)": loss.route,
        "the worker no longer held them (residency)": loss.residency,
        "they lay in another tier (transfer)": loss.transfer,
    }
    lost = "; ".join(f"{tokens} because {why}" for why, tokens in gates.items() if tokens)
    yield f"  Eligible tokens that were not hit: {loss.total}{f': {lost}' if lost else ''}."


def _attempts(attempts: tuple[Attempt, ...]) -> Iterable[str]:
    if all(attempt.fault is None for attempt in attempts):
        return
    yield "  Attempts:"
    for attempt in attempts:
        status = f", HTTP {attempt.http_status}" if attempt.http_status is not None else ""
        result = f"failed: {attempt.fault}{status}" if attempt.fault else f"answered{status}"
        yield f"    {attempt.attempt}. {attempt.worker} at {_number(attempt.started_ms)} ms: {result}"


def _times(receipt: Receipt) -> Iterable[str]:
    yield (
        f"  Time to first token {_known(receipt.ttft_ms, 'ms')}, to the end {_known(receipt.e2e_ms, 'ms')};"
        f" the decision took {_known(receipt.decision_us, 'us')}."
    )


def _identity(receipt: Receipt) -> Iterable[str]:
    if receipt.incarnation is not None:
        yield f"  Incarnation {receipt.incarnation}; engine {receipt.engine or 'unknown'}."
    if receipt.manifest_digest is not None:
        yield f"  Manifest {receipt.manifest_digest}."


def _known(value: float | None, unit: str) -> str:
    return f"unknown {unit}" if value is None else f"{_number(value)} {unit}"


def _number(value: float) -> str:
    """Whole numbers in full, others to four significant digits."""
    if isinstance(value, int) or value == round(value):
        return str(round(value))
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
