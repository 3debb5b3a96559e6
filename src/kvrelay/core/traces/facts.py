"""What there is to know about a trace before anything is replayed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvrelay.core.stats.distribution import Distribution, distribution
from kvrelay.core.traces.derived_sessions import derived_sessions
from kvrelay.core.traces.reuse import Request, Reuse, TailRule, add_up, endless_cache
from kvrelay.core.traces.trace import NO_SCOPE, Trace, arrivals

DENOMINATORS = {
    "token_hit": "hit tokens / all input tokens, first requests included",
    "block_hit": "hit blocks / all blocks, first requests included",
}
TAIL_RULES: dict[TailRule, str] = {
    "listed": "all ids of a row count, the partial last block too",
    "full": "full blocks only, as engines cache them",
}


class Lengths(Struct, frozen=True):
    """Of requests, and of sessions (sub-agents are sessions of their own here)."""

    input_tokens: Distribution
    output_tokens: Distribution
    turns: Distribution
    think_ms: Distribution  # before the second and later turns of a session; no samples where a format has no pauses
    session_span_ms: Distribution  # from the first to the last request of a session that has more than one


class Shares(Struct, frozen=True):
    """Of all blocks: who had sent them before. They add up to 1."""

    same_session: float
    family: float  # a parent, a sub-agent, or another sub-agent of the same parent
    other_sessions: float
    never_seen: float


class EndlessCache(Struct, frozen=True):
    """`Reuse` with the words that belong to its figures."""

    tail_rule: TailRule
    tail_rule_means: str
    denominators: dict[str, str]
    requests: int
    blocks: int
    hit_blocks: int
    block_hit: float | None
    tokens: int
    hit_tokens: int
    token_hit: float | None
    token_hit_second_half: float | None
    block_shares: Shares | None


class TraceFacts(Struct, frozen=True):
    sessions: int
    sub_agents: int
    requests: int
    derived_sessions: int | None  # where rows have blocks and no sessions; null elsewhere
    input_tokens: int
    output_tokens: int
    block_size_tokens: int | None
    hash_scope: str
    partial_tails: int  # requests whose last listed block is not full
    span_ms: float
    requests_per_s: float | None
    lengths: Lengths
    endless_cache: tuple[EndlessCache, ...]  # once per tail rule that makes a difference
    limitations: tuple[str, ...]
    notices: tuple[str, ...]
    label: str


class Examined(Struct, frozen=True):
    """The facts, and the requests that they were counted from."""

    facts: TraceFacts
    requests: list[Request]


def examine(trace: Trace) -> Examined:
    owners = _derived_owners(trace)
    listed = endless_cache(trace, owners=owners)
    partial = _partial_tails(trace)
    by_rule: dict[TailRule, list[Request]] = {"listed": listed}
    if partial:
        by_rule["full"] = endless_cache(trace, tail_rule="full", owners=owners)
    caches = () if trace.hash_scope == NO_SCOPE else tuple(_cache(rule, found) for rule, found in by_rule.items())
    span_ms = listed[-1].at_ms - listed[0].at_ms if listed else 0.0
    facts = TraceFacts(
        sessions=sum(session.parent_id is None for session in trace.sessions),
        sub_agents=sum(session.parent_id is not None for session in trace.sessions),
        requests=trace.requests,
        derived_sessions=None if owners is None else len(set(owners)),
        input_tokens=trace.input_tokens,
        output_tokens=sum(turn.output_tokens for session in trace.sessions for turn in session.turns),
        block_size_tokens=trace.block_size_tokens or None,
        hash_scope=trace.hash_scope,
        partial_tails=partial,
        span_ms=round(span_ms, 3),
        requests_per_s=round((len(listed) - 1) / span_ms * 1000, 6) if span_ms else None,
        lengths=_lengths(trace),
        endless_cache=caches,
        limitations=trace.limitations(),
        notices=trace.notices,
        label=trace.label,
    )
    return Examined(facts, listed)


def _derived_owners(trace: Trace) -> list[str] | None:
    """Where every row is a session of its own, who continues whom is seen in the blocks only."""
    if not trace.block_size_tokens or any(len(session.turns) > 1 for session in trace.sessions):
        return None
    return [f"derived-{number}" for number in derived_sessions(trace)]


def _partial_tails(trace: Trace) -> int:
    size = trace.block_size_tokens
    return sum(len(a.turn.block_ids) * size > a.turn.input_tokens for a in arrivals(trace)) if size else 0


def _lengths(trace: Trace) -> Lengths:
    turns = [turn for session in trace.sessions for turn in session.turns]
    longer = [session for session in trace.sessions if len(session.turns) > 1]
    pauses = [turn.think_ms for session in longer for turn in session.turns[1:]]
    return Lengths(
        input_tokens=distribution([turn.input_tokens for turn in turns]),
        output_tokens=distribution([turn.output_tokens for turn in turns]),
        turns=distribution([len(session.turns) for session in trace.sessions]),
        think_ms=distribution(pauses if any(pauses) else []),
        session_span_ms=distribution([session.turns[-1].due_ms for session in longer]),
    )


def _cache(rule: TailRule, requests: Sequence[Request]) -> EndlessCache:
    reuse = add_up(requests, tail_rule=rule)
    return EndlessCache(
        tail_rule=rule,
        tail_rule_means=TAIL_RULES[rule],
        denominators=DENOMINATORS,
        requests=reuse.requests,
        blocks=reuse.blocks,
        hit_blocks=reuse.hit_blocks,
        block_hit=reuse.block_hit,
        tokens=reuse.tokens,
        hit_tokens=reuse.hit_tokens,
        token_hit=reuse.token_hit,
        token_hit_second_half=reuse.token_hit_second_half,
        block_shares=_shares(reuse),
    )


def _shares(reuse: Reuse) -> Shares | None:
    if not reuse.blocks:
        return None
    parts = (reuse.own_hit_blocks, reuse.family_hit_blocks, reuse.other_hit_blocks, reuse.missed_blocks)
    return Shares(*(round(part / reuse.blocks, 6) for part in parts))
