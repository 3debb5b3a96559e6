"""A trace as a cache sees it: requests in order of time, each a chain of numbered blocks."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvrelay.core.traces.derived_sessions import derived_sessions
from kvrelay.core.traces.trace import Trace, arrivals, root_of


class PrefixRequest(Struct, frozen=True):
    """`blocks` are dense numbers, equal exactly when the contents up to there are. A sub-agent counts to the `session`
    that started it."""

    at_s: float
    session: str
    blocks: tuple[int, ...]
    input_tokens: int
    output_tokens: int = 0


class PrefixTrace(Struct, frozen=True):
    """Blocks are numbered 0..`distinct_blocks` - 1."""

    block_size_tokens: int
    requests: tuple[PrefixRequest, ...]
    distinct_blocks: int

    @property
    def blocks(self) -> int:
        return sum(len(request.blocks) for request in self.requests)

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)


def prefix_trace(trace: Trace, *, partial_tail: bool = False) -> PrefixTrace:
    """All requests in order of arrival. Where the trace names no sessions they are derived from shared blocks.

    `partial_tail`: also the last block of a prompt that does not fill it, where the trace lists it. Engines cache full
    blocks only, so it is left out unless asked for.
    """
    chains = _Chains()
    size = trace.block_size_tokens
    sessions = request_sessions(trace)
    requests = []
    for number, arrival in enumerate(arrivals(trace)):
        turn = arrival.turn
        kept = turn.block_ids if partial_tail else turn.block_ids[: turn.input_tokens // size]
        blocks = chains.numbered(arrival.session.scope, kept)
        requests.append(
            PrefixRequest(arrival.at_ms / 1000, sessions[number], blocks, turn.input_tokens, turn.output_tokens)
        )
    return PrefixTrace(size, tuple(requests), chains.distinct)


def request_sessions(trace: Trace) -> list[str]:
    """The session of every request in order of arrival. A file in which every row stands alone has derived ones."""
    if all(len(session.turns) == 1 and session.parent_id is None for session in trace.sessions):
        return [f"derived-{number}" for number in derived_sessions(trace)]
    parents = {session.session_id: session.parent_id for session in trace.sessions}
    return [root_of(arrival.session.session_id, parents) for arrival in arrivals(trace)]


class _Chains:
    """Numbers for blocks. A KV block is a function of all tokens before it, so one id behind two different blocks is
    two contents; most traces never do that, and those pay little for the question."""

    def __init__(self) -> None:
        self.distinct = 0
        self._usual: dict[str, dict[int, int]] = {}
        self._parent_of: list[int] = []
        self._unusual: dict[tuple[int, str, int], int] = {}

    def numbered(self, scope: str, block_ids: Sequence[int]) -> tuple[int, ...]:
        usual = self._usual.setdefault(scope, {})
        parent_of = self._parent_of
        numbers, parent = [], -1
        for block_id in block_ids:
            number = usual.get(block_id)
            if number is None:
                number = usual[block_id] = self._new(parent)
            elif parent_of[number] != parent:
                key = (parent, scope, block_id)
                known = self._unusual.get(key)
                if known is None:
                    known = self._unusual[key] = self._new(parent)
                number = known
            numbers.append(number)
            parent = number
        return tuple(numbers)

    def _new(self, parent: int) -> int:
        self._parent_of.append(parent)
        self.distinct += 1
        return self.distinct - 1
