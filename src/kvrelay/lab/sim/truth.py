"""What every engine really held when a request reached it, and why the rest of the request was missed.

Fed by the engines themselves, before any weather: nothing here is an estimate, and the router never sees it. A request
is judged when its engine admits it, because what it finds then is final.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvrelay.core.cachesim.misses import Counted, Miss
from kvrelay.core.engine.engine import Admitted
from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, BlocksStored, KvBatch


class _Holdings:
    """One worker's findable blocks by name, with their copies."""

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}
        self.gone: dict[int, Miss] = {}

    def store(self, names: Sequence[int]) -> None:
        for name in names:
            self.copies[name] = self.copies.get(name, 0) + 1

    def remove(self, names: Sequence[int]) -> None:
        for name in names:
            left = self.copies.get(name, 0) - 1
            if left > 0:
                self.copies[name] = left
            else:
                self.copies.pop(name, None)
                self.gone[name] = Miss.CAPACITY

    def invalidate(self) -> None:
        self.gone.update(dict.fromkeys(self.copies, Miss.INVALIDATED))
        self.copies.clear()

    def matched(self, names: Sequence[int]) -> int:
        copies = self.copies
        return next((depth for depth, name in enumerate(names) if name not in copies), len(names))


class TruthResult(Struct):
    """Sums over the requests that engines admitted. Hits and classes of misses add up to the input tokens."""

    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    misses: dict[Miss, Counted] = {}

    def check(self) -> None:
        missed = sum(counted.tokens for counted in self.misses.values())
        assert self.hit_tokens + missed == self.input_tokens, (self.hit_tokens, self.misses, self.input_tokens)


class Truth:
    """Workers name their blocks alike (one hash seed), so a block is the same block everywhere."""

    def __init__(self, block_size_tokens: int) -> None:
        self._size = block_size_tokens
        self._holdings: dict[str, _Holdings] = {}
        self._seen: set[int] = set()  # asked for membership only
        self.result = TruthResult(misses={kind: Counted() for kind in Miss})

    def published(self, batch: KvBatch) -> None:
        holdings = self._of(batch.worker.name)
        for event in batch.events:
            match event:
                case BlocksStored():
                    holdings.store(event.hashes)
                case BlocksRemoved():
                    holdings.remove(event.hashes)
                case BlocksCleared():
                    holdings.invalidate()

    def life_ended(self, worker: str) -> None:
        self._of(worker).invalidate()

    def admitted(self, worker: str, names: Sequence[int], admitted: Admitted) -> None:
        """`names` are those of the request's full prompt blocks."""
        result, size = self.result, self._size
        tokens, hit_tokens = admitted.prompt_tokens, admitted.cached_tokens
        result.requests += 1
        result.input_tokens += tokens
        result.hit_tokens += hit_tokens
        most = (tokens - 1) // size
        first = hit_tokens // size
        best = max(holdings.matched(names) for holdings in self._holdings.values()) if self._holdings else 0
        never_seen = Miss.NEW_SUFFIX if names and names[0] in self._seen else Miss.COLD
        for depth in range(first, len(names)):
            kind = never_seen
            if names[depth] in self._seen:
                kind = Miss.BELOW_BLOCK if depth >= most else self._why_lost(worker, names, depth, best)
            result.misses[kind].add(1, size)
        result.misses[Miss.BELOW_BLOCK].tokens += tokens - len(names) * size
        self._seen.update(names)

    def _why_lost(self, worker: str, names: Sequence[int], depth: int, best: int) -> Miss:
        if depth < best:
            return Miss.OTHER_WORKER
        own = self._of(worker).gone
        if names[depth] in own:
            return own[names[depth]]
        for holdings in self._holdings.values():
            if names[depth] in holdings.gone:
                return holdings.gone[names[depth]]
        return Miss.OTHER_WORKER  # seen and gone nowhere: it is still being computed by somebody

    def _of(self, worker: str) -> _Holdings:
        holdings = self._holdings.get(worker)
        if holdings is None:
            holdings = self._holdings[worker] = _Holdings()
        return holdings
