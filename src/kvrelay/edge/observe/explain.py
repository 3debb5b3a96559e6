"""A receipt told in words: where the request went and why, what was claimed and what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kvrelay.core.model.place import Hop
from kvrelay.core.model.units import RouteReason
from kvrelay.core.receipts.receipt import Attempt, Candidate, Receipt
from kvrelay.core.receipts.reconcile import stale_index_tokens
from kvrelay.edge.observe.receipt_words import FALLBACKS, GATES, REASONS, TERMS

SUM_TOLERANCE = 1e-6
_HOPS = {Hop.RACK: "; in this rack", Hop.ZONE: "; in this zone", Hop.BEYOND: "; in another zone"}


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
    if receipt.over_deadline_ms:
        late = ", ".join(f"{name} {ms:,.0f} ms" for name, ms in receipt.over_deadline_ms.items())
        yield f"  Too late for its deadline of {receipt.deadline_ms:,.0f} ms, by the first token expected: {late}."
    why = REASONS[receipt.route_reason]
    if receipt.chosen_worker is None:
        yield f"  It went to no worker: {why} ({receipt.route_reason})."
        return
    where = f"{receipt.chosen_worker}{_rank(receipt.rank)}"
    yield f"  Policy {receipt.policy} sent it to {where}, because {why} ({receipt.route_reason})."
    if receipt.models_payload is False:
        yield "  That worker is a mock: no KV tensor and no real latency stand behind its answers."
    if receipt.spilled_from:
        what = "of its session is" if receipt.route_reason == RouteReason.STICKY_SPILL else "that held more of it was"
        yield f"  The worker {what} {receipt.spilled_from}."
    if receipt.fallback_reason is not None and receipt.fallback_reason in FALLBACKS:  # the route reason tells others
        yield f"  {FALLBACKS[receipt.fallback_reason]} ({receipt.fallback_reason})."
    if receipt.not_retried_because:
        yield f"  It failed and no other worker was asked: {receipt.not_retried_because}."
    if receipt.not_migrated_because:
        yield f"  Its stream broke and no other worker could go on with it: {receipt.not_migrated_because}."


def _outcome(receipt: Receipt) -> str:
    status = str(receipt.status)
    if receipt.http_status is not None:
        status += f", HTTP {receipt.http_status}"
    return f"{status}, {receipt.failure_reason}" if receipt.failure_reason else status


def _prompt(receipt: Receipt) -> Iterable[str]:
    if receipt.unscored_because:
        yield f"  The prompt was not matched against the index: {receipt.unscored_because}."
    if receipt.prompt_tokens is None:
        return
    eligible = ""
    if receipt.eligible_prefix_tokens is not None:
        blocks = _known(receipt.eligible_prefix_blocks, "full blocks")
        eligible = f", of which {_known(receipt.eligible_prefix_tokens, 'tokens')} ({blocks}) could come from a cache"
    answer = f"; answer of {_known(receipt.completion_tokens, 'tokens')}" if receipt.completion_tokens else ""
    yield f"  Prompt of {_known(receipt.prompt_tokens, 'tokens')}{eligible}{answer}."


def _claim_and_actual(receipt: Receipt) -> Iterable[str]:
    tiers = [f"{_number(tokens)} {tier}" for tier, tokens in (receipt.matched_tiers_at_route or {}).items() if tokens]
    where = f" ({', '.join(tiers)})" if len(tiers) > 1 else ""
    state = f"; that worker's index was {receipt.index_state}" if receipt.index_state else ""
    claimed = _tokens_and_blocks(receipt.matched_tokens_at_route, receipt.matched_blocks_at_route)
    actual = _tokens_and_blocks(receipt.actual_cached_tokens, receipt.actual_local_hits)
    yield f"  Claimed when routing: {claimed}{where}{state}."
    yield f"  Hit according to the engine: {actual}. {_difference(receipt)}"


def _tokens_and_blocks(tokens: int | None, blocks: int | None) -> str:
    if tokens is None:
        return "unknown"
    return f"{_known(tokens, 'tokens')}, {_known(blocks, 'blocks')}" if tokens else "none"


def _difference(receipt: Receipt) -> str:
    stale = stale_index_tokens(receipt)
    if stale is None:
        return "The two cannot be compared."
    if stale == 0:
        return "The claim was exact."
    too_many = f"The index claimed {_known(stale, 'tokens')} too many."
    return too_many if stale > 0 else f"The index missed {_known(-stale, 'tokens')}."


# --- who was compared ------------------------------------------------------------------------------------------------


def _candidates(receipt: Receipt) -> Iterable[str]:
    if not receipt.candidates:
        return
    yield f"  Candidates, {len(receipt.candidates)} of {receipt.candidates_total} ({_order(receipt.candidates)}):"
    for candidate in receipt.candidates:
        chosen = (candidate.worker, candidate.incarnation, candidate.rank) == (
            receipt.chosen_worker,
            receipt.incarnation,
            receipt.rank,
        )
        yield f"    {'->' if chosen else '  '} {candidate.worker}{_rank(candidate.rank)}{_arithmetic(candidate)}"
        yield f"         {_matched(candidate, receipt)}; {_load(candidate.load)}{_HOPS.get(candidate.hop, '')}"
    yield from _legend(receipt.candidates)


def _order(candidates: tuple[Candidate, ...]) -> str:
    names = [name for candidate in candidates for name in candidate.terms]
    if not names:
        return "this policy does not score"
    if all(name.endswith("_ms") for name in names):
        return "predicted ms to the first token, the lowest is best"
    if set(names) == {"requests"}:
        return "requests in hand, the fewest is best"
    return "score in blocks, the highest is best"


def _rank(rank: int | None) -> str:
    return f", rank {rank}" if rank else ""


def _arithmetic(candidate: Candidate) -> str:
    """Terms that add nothing are left out."""
    if candidate.score is None:
        return ""
    terms = " ".join(_signed(name, value) for name, value in candidate.terms.items() if value).removeprefix("+ ")
    doubt = "" if terms_add_up(candidate) else f" (the terms sum to {_number(math.fsum(candidate.terms.values()))}!)"
    return f": {_number(candidate.score)} = {terms or '0'}{doubt}"


def _signed(name: str, value: float) -> str:
    return f"{'-' if value < 0 else '+'} {_number(abs(value))} {name}"


def _matched(candidate: Candidate, receipt: Receipt) -> str:
    if receipt.matched_tokens_at_route is None:
        return "not matched"
    tiers = [f"{_number(tokens)} tokens in {tier}" for tier, tokens in candidate.matched_tokens.items() if tokens]
    return f"holds {', '.join(tiers)}" if tiers else "holds none of it"


def _load(load: Mapping[str, float]) -> str:
    """`active_requests: 2` as `2 active requests`: the names carry their unit at the end."""
    figures = [_known(value, name.replace("_per_s", "/s").replace("_", " ")) for name, value in load.items() if value]
    return ", ".join(figures) or "no load"


def _legend(candidates: tuple[Candidate, ...]) -> Iterable[str]:
    names = dict.fromkeys(name for candidate in candidates for name, value in candidate.terms.items() if value)
    for name in names:
        if name in TERMS:
            yield f"       {name}: {TERMS[name]}"


# --- what came of it -------------------------------------------------------------------------------------------------


def _losses(receipt: Receipt) -> Iterable[str]:
    loss = receipt.gate_loss_tokens
    if loss is None:
        return
    if not loss.total:
        yield (
            "  Every token that could be hit was hit." if receipt.eligible_prefix_tokens else "  Nothing could be hit."
        )
        return
    lost = {gate: tokens for gate in GATES if (tokens := getattr(loss, gate))}
    parts = [f"{_number(tokens)} because {GATES[gate]} ({gate})" for gate, tokens in lost.items()]
    total = f"{_number(loss.total)}, of them " if len(parts) > 1 else ""
    yield f"  Tokens that could be hit and were not: {total}{'; '.join(parts)}."


def _attempts(attempts: tuple[Attempt, ...]) -> Iterable[str]:
    if all(attempt.fault is None for attempt in attempts):
        return
    yield "  Attempts:"
    for attempt in attempts:
        status = f", HTTP {attempt.http_status}" if attempt.http_status is not None else ""
        begin = "went on with the stream, " if attempt.continued else ""
        result = begin + (f"failed: {attempt.fault}{status}" if attempt.fault else f"answered{status}")
        yield f"    {attempt.attempt}. {attempt.worker} at {_number(attempt.started_ms)} ms: {result}"


def _times(receipt: Receipt) -> Iterable[str]:
    waited = f"Waited {_number(receipt.router_queue_ms)} ms for a place. " if receipt.router_queue_ms else ""
    first = "" if receipt.ttft_ms is None else f"First token after {_number(receipt.ttft_ms)} ms. "
    end = "" if receipt.e2e_ms is None else f"End after {_number(receipt.e2e_ms)} ms. "
    decision = "" if receipt.decision_us is None else f"Deciding took {_number(receipt.decision_us)} us."
    told = f"{waited}{first}{end}{decision}".strip()
    if told:
        yield f"  {told}"


def _identity(receipt: Receipt) -> Iterable[str]:
    if receipt.incarnation is not None:
        yield f"  Incarnation {receipt.incarnation}; engine {receipt.engine or 'unknown'}."
    if receipt.manifest_digest is not None:
        yield f"  Manifest {receipt.manifest_digest}."


def _known(value: float | None, unit: str) -> str:
    if value == 1:
        unit = unit.removesuffix("s")
    return f"unknown {unit}" if value is None else f"{_number(value)} {unit}"


def _number(value: float) -> str:
    """Whole numbers in full, others to four significant digits."""
    if isinstance(value, int) or value == round(value):
        return f"{round(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
