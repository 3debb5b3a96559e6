"""A trace as a cache sees it: requests in order of time, each a chain of numbered blocks."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvrelay.core.traces.trace import Trace


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
    """All turns on one clock; turns of the same instant stay in the order of the file.

    `partial_tail`: also the last block of a prompt that does not fill it, where the trace lists it. Engines cache full
    blocks only, so it is left out unless asked for.
    """
    chains = _Chains()
    size = trace.block_size_tokens
    timed: list[tuple[float, PrefixRequest]] = []
    for session in trace.sessions:
        for turn in session.turns:
            kept = turn.block_ids if partial_tail else turn.block_ids[: turn.input_tokens // size]
            at_s = (session.start_ms + turn.due_ms) / 1000
            blocks = chains.numbered(session.scope, kept)
            root = session.parent_id or session.session_id
            timed.append((at_s, PrefixRequest(at_s, root, blocks, turn.input_tokens, turn.output_tokens)))
    timed.sort(key=lambda entry: entry[0])
    return PrefixTrace(size, tuple(request for _, request in timed), chains.distinct)


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


def with_derived_sessions(trace: PrefixTrace, *, least_blocks: int = 2) -> PrefixTrace:
    """For traces whose rows name no session: a request goes on with the one whose last full block it contains.

    Each session claims its last full block. A request looks for a claim from its end towards its second block, takes it
    over, and claims its own last full block if it has at least two full ones.
    """
    claims: dict[int, str] = {}
    size = trace.block_size_tokens
    requests = []
    sessions = 0
    for request in trace.requests:
        claimed = next((block for block in request.blocks[:0:-1] if block in claims), None)
        if claimed is None:
            session, sessions = f"derived-{sessions}", sessions + 1
        else:
            session = claims.pop(claimed)
        full = request.input_tokens // size
        if full >= least_blocks:
            claims[request.blocks[full - 1]] = session
        requests.append(
            PrefixRequest(request.at_s, session, request.blocks, request.input_tokens, request.output_tokens)
        )
    return PrefixTrace(size, tuple(requests), trace.distinct_blocks)
