"""Did an arm start on empty caches? Asked of the engines, because whoever reset them is not a witness.

Three signs, any of which is enough: the first request already hit or was promised something; requests hit more than all
that the arm itself had sent before them; the fresh index was not empty although the caches should have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from kvrelay.lab.arms.counters import Counted
from kvrelay.lab.arms.settings import Reset
from kvrelay.lab.replay.sample import Sample

TOLERATED_RATIO = 0.01  # of the prompt tokens: two requests of one moment may reach a worker in the other order


class IsolationState(StrEnum):
    CLEAN = "clean"
    CONTAMINATED = "contaminated"
    UNVERIFIED = "unverified"


class Isolation(Struct, frozen=True):
    """`engine_hit_ratio` is hits / queries in the engines' own counters over the arm; None: no engine counts them."""

    reset: Reset
    state: IsolationState
    reason: str
    index_blocks_at_start: int
    first_request_hit_tokens: int | None
    first_request_claimed_tokens: int | None
    impossible_hit_tokens: int | None
    engine_hit_ratio: float | None


class Start(Struct, frozen=True):
    """What was there before the first request."""

    reset: Reset
    index_blocks: int


def isolation_of(
    start: Start,
    samples: Sequence[Sample],
    claims: Mapping[str, int | None],
    seen_tokens: Mapping[str, int],
    counted: Mapping[str, Counted],
) -> Isolation:
    """`claims` and `seen_tokens` are by request id: what the router promised, and what the arm had sent before."""
    first = min(samples, key=lambda sample: sample.sent_ms, default=None)
    hits = None if first is None else first.cached_tokens
    claimed = None if first is None else claims.get(first.request_id)
    impossible = _impossible(samples, seen_tokens)
    ratio = engine_hit_ratio(counted)
    state, reason = _judged(start, samples, hits, claimed, impossible)
    if state is IsolationState.CONTAMINATED and ratio is not None:
        reason += f"; the workers' own counters say {100 * ratio:.1f} % hits over the arm"
    return Isolation(
        reset=start.reset,
        state=state,
        reason=reason,
        index_blocks_at_start=start.index_blocks,
        first_request_hit_tokens=hits,
        first_request_claimed_tokens=claimed,
        impossible_hit_tokens=impossible,
        engine_hit_ratio=ratio,
    )


def engine_hit_ratio(counted: Mapping[str, Counted]) -> float | None:
    """Over all workers; None unless every one of them counts."""
    queries = [one.queries_tokens for one in counted.values()]
    hits = [one.hits_tokens for one in counted.values()]
    if not counted or None in queries or None in hits:
        return None
    asked = sum(value or 0 for value in queries)
    return sum(value or 0 for value in hits) / asked if asked else None


def _judged(
    start: Start, samples: Sequence[Sample], hits: int | None, claimed: int | None, impossible: int | None
) -> tuple[IsolationState, str]:
    prompt_tokens = sum(sample.prompt_tokens or 0 for sample in samples)
    if hits:
        return IsolationState.CONTAMINATED, f"the first request hit {hits} tokens that the arm had not sent"
    if claimed:
        return IsolationState.CONTAMINATED, f"the first request was promised {claimed} tokens that the arm had not sent"
    if impossible is not None and impossible > TOLERATED_RATIO * prompt_tokens:
        return IsolationState.CONTAMINATED, f"requests hit {impossible} tokens more than the arm had sent before them"
    if start.index_blocks and start.reset in (Reset.FRESH_PROCESSES, Reset.PREFIX_CACHE):
        return IsolationState.CONTAMINATED, f"the index knew {start.index_blocks} blocks before the first request"
    if hits is None or impossible is None:
        return IsolationState.UNVERIFIED, "the engines do not report what they hit"
    return IsolationState.CLEAN, "no hit, no claim and no block from before the arm"


def _impossible(samples: Sequence[Sample], seen_tokens: Mapping[str, int]) -> int | None:
    """Hit tokens beyond what the arm had sent; None when no answer said what it hit."""
    known = [sample for sample in samples if sample.cached_tokens is not None and sample.request_id in seen_tokens]
    if not known:
        return None
    return sum(max(0, (sample.cached_tokens or 0) - seen_tokens[sample.request_id]) for sample in known)
