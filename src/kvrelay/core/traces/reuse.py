"""How much of a trace one cache without any bound would have answered: the ceiling of every policy and every tier.

A hit is the longest prefix of a request's blocks that earlier requests had. A prompt's blocks are there the moment it
arrives: nothing is evicted, nothing is still being computed, and answers add no blocks. What is counted as a block
differs between sources, so every figure names its rule: `listed` counts all ids of a row, the partial last block too
(as published figures do); `full` counts full blocks only (as engines cache them).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from typing import Literal

from msgspec import Struct

from kvrelay.core.traces.trace import Trace, arrivals, root_of

TailRule = Literal["listed", "full"]


class Request(Struct, frozen=True):
    """One request against the endless cache. Tokens are those of the prompt that the matched blocks cover."""

    at_ms: float
    session_id: str
    blocks: int
    hit_blocks: int
    own_hit_blocks: int  # of them, what the same session had sent before
    family_hit_blocks: int  # what its parent, its sub-agents or their siblings had sent before
    input_tokens: int
    hit_tokens: int
    idle_ms: float | None  # since the deepest hit block was last asked for; null without a hit


class Reuse(Struct, frozen=True):
    """Sums over requests. Denominators are all blocks and all input tokens of the trace, first requests included."""

    tail_rule: TailRule
    requests: int
    blocks: int
    hit_blocks: int
    tokens: int
    hit_tokens: int
    missed_blocks: int
    own_hit_blocks: int
    family_hit_blocks: int
    token_hit_second_half: float | None  # of the later half of the requests: what a warm cache sees

    @property
    def block_hit(self) -> float | None:
        return round(self.hit_blocks / self.blocks, 6) if self.blocks else None

    @property
    def token_hit(self) -> float | None:
        return round(self.hit_tokens / self.tokens, 6) if self.tokens else None

    @property
    def other_hit_blocks(self) -> int:
        """Hits on what only other sessions had sent."""
        return self.hit_blocks - self.own_hit_blocks - self.family_hit_blocks


def endless_cache(
    trace: Trace, *, tail_rule: TailRule = "listed", owners: Sequence[str] | None = None
) -> list[Request]:
    """Every request in the order of arrival. `owners` are names of sessions to use instead of the trace's own."""
    size = trace.block_size_tokens
    families = _families(trace)
    touched_ms: dict[str, dict[int, float]] = defaultdict(dict)  # by scope: block -> when it was last asked for
    owned: dict[str, set[int]] = defaultdict(set)  # ids have one scope within a session and its family
    kin: dict[str, set[int]] = defaultdict(set)
    found = []
    for number, arrival in enumerate(arrivals(trace)):
        session, turn = arrival.session, arrival.turn
        owner = owners[number] if owners is not None else session.session_id
        ids = turn.block_ids if tail_rule == "listed" or not size else turn.block_ids[: turn.input_tokens // size]
        touched, own = touched_ms[session.scope], owned[owner]
        relatives = kin[families.get(owner, owner)]
        depth = _prefix_in(touched, ids)
        hits = ids[:depth]
        own_hits = sum(map(own.__contains__, hits))
        family_hits = sum(map(relatives.__contains__, hits)) - own_hits
        idle_ms = arrival.at_ms - touched[hits[-1]] if hits else None
        touched.update(dict.fromkeys(ids, arrival.at_ms))
        own.update(ids)
        relatives.update(ids)
        hit_tokens = min(depth * size, turn.input_tokens)
        found.append(
            Request(
                at_ms=arrival.at_ms,
                session_id=owner,
                blocks=len(ids),
                hit_blocks=depth,
                own_hit_blocks=own_hits,
                family_hit_blocks=family_hits,
                input_tokens=turn.input_tokens,
                hit_tokens=hit_tokens,
                idle_ms=idle_ms,
            )
        )
    return found


def _prefix_in(known: Container[int], ids: Sequence[int]) -> int:
    """How many ids from the first on are known, up to the first that is not."""
    present = list(map(known.__contains__, ids))
    return len(ids) if all(present) else present.index(False)


def reuse_of(trace: Trace, *, tail_rule: TailRule = "listed") -> Reuse:
    return add_up(endless_cache(trace, tail_rule=tail_rule), tail_rule=tail_rule)


def add_up(requests: Sequence[Request], *, tail_rule: TailRule) -> Reuse:
    late = requests[len(requests) // 2 :]
    late_tokens = sum(request.input_tokens for request in late)
    blocks, hit_blocks = sum(r.blocks for r in requests), sum(r.hit_blocks for r in requests)
    return Reuse(
        tail_rule=tail_rule,
        requests=len(requests),
        blocks=blocks,
        hit_blocks=hit_blocks,
        tokens=sum(r.input_tokens for r in requests),
        hit_tokens=sum(r.hit_tokens for r in requests),
        missed_blocks=blocks - hit_blocks,
        own_hit_blocks=sum(r.own_hit_blocks for r in requests),
        family_hit_blocks=sum(r.family_hit_blocks for r in requests),
        token_hit_second_half=round(sum(r.hit_tokens for r in late) / late_tokens, 6) if late_tokens else None,
    )


def _families(trace: Trace) -> dict[str, str]:
    """The name of everybody's family: of the session that started all of it."""
    parents = {session.session_id: session.parent_id for session in trace.sessions}
    return {name: root_of(name, parents) for name in parents}
