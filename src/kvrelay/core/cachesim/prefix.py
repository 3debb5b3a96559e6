"""Prefix caches of several workers over a trace: what is hit, and why the rest is not.

A hit is the longest prefix of a request's blocks that its worker holds at arrival. The blocks of a request are there
the moment it is routed: no concurrency, no pinning, no output blocks. That is the model of capacity questions; what
concurrency and delayed events add is what `lab/sim` is for.

Eviction policies are taken as they are: every listed block can be hit. Engine models follow their engine: at least one
token of a prompt is computed, and what is not a full prompt block (a partial last one, the output) takes room as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from kvrelay.core.cachesim.engines import EngineModel
from kvrelay.core.cachesim.eviction.policy import Departure, EvictionPolicy, OnGone
from kvrelay.core.cachesim.misses import Counted, Miss
from kvrelay.core.cachesim.prefix_trace import PrefixRequest, PrefixTrace
from kvrelay.core.cachesim.routers import Router
from kvrelay.core.cachesim.tiers import Tiered

Cache = EvictionPolicy | EngineModel
MakeCache = Callable[[OnGone], Cache]

_MISS_OF = {
    Departure.CAPACITY: Miss.CAPACITY,
    Departure.EXPIRED: Miss.EXPIRED,
    Departure.INVALIDATED: Miss.INVALIDATED,
}


class WorkerShare(Struct):
    """What one worker got."""

    requests: int = 0
    computed_tokens: int = 0


class PrefixResult(Struct):
    """Totals over a trace. Every input token is either hit or in exactly one class of `misses`."""

    requests: int
    blocks: int
    input_tokens: int
    hit: Counted
    hit_second_half: Counted  # of the second half of the requests, when caches are warm
    input_tokens_second_half: int
    misses: dict[Miss, Counted]
    workers: list[WorkerShare]
    expired_blocks: int = 0  # that time has taken, whether somebody missed them or not
    evicted_blocks: int = 0
    invalidated_blocks: int = 0
    hit_tokens_by_tier: dict[int, int] = {}  # 0 is the nearest; empty where there is only one

    @property
    def token_hit_ratio(self) -> float:
        return self.hit.tokens / self.input_tokens if self.input_tokens else 0.0

    def check(self) -> None:
        """Hits and classes of misses add up to all there was."""
        missed_blocks = sum(counted.blocks for counted in self.misses.values())
        missed_tokens = sum(counted.tokens for counted in self.misses.values())
        assert self.hit.blocks + missed_blocks == self.blocks, (self.hit, self.misses, self.blocks)
        assert self.hit.tokens + missed_tokens == self.input_tokens, (self.hit, self.misses, self.input_tokens)


class PrefixCaches:
    """One cache per worker. `serve` takes one request; `result` is complete after every call."""

    def __init__(
        self, trace: PrefixTrace, make_cache: MakeCache, router: Router | None = None, *, workers: int = 1
    ) -> None:
        assert router is not None or workers == 1, "several workers need a router"
        self._size = trace.block_size_tokens
        self._router = router
        self._seen = bytearray(trace.distinct_blocks)
        self._gone: dict[int, Departure] = {}  # how each block left last, wherever that was
        self.caches = [make_cache(self._note_gone) for _ in range(workers)]
        self._engines = isinstance(self.caches[0], EngineModel)
        self._half = len(trace.requests) // 2
        self.result = PrefixResult(
            requests=0,
            blocks=0,
            input_tokens=0,
            hit=Counted(),
            hit_second_half=Counted(),
            input_tokens_second_half=0,
            misses={kind: Counted() for kind in Miss},
            workers=[WorkerShare() for _ in range(workers)],
        )

    def serve(self, request: PrefixRequest) -> int:
        """Routes the request, counts, and lets its worker cache it. Answers the hit tokens."""
        blocks, result, size = request.blocks, self.result, self._size
        for cache in self.caches:
            cache.advance(request.at_s)
        most = len(blocks)
        if self._engines:
            most = min(most, (request.input_tokens - 1) // size)
        matches = [_matched(cache, blocks, most) for cache in self.caches]
        chosen = self._choose(request, matches)
        matched = matches[chosen]
        hit_tokens = min(matched * size, request.input_tokens)
        if result.requests >= self._half:
            result.hit_second_half.add(matched, hit_tokens)
            result.input_tokens_second_half += request.input_tokens
        result.requests += 1
        result.blocks += len(blocks)
        result.input_tokens += request.input_tokens
        result.hit.add(matched, hit_tokens)
        if isinstance(self.caches[chosen], Tiered):
            self._count_tiers(self.caches[chosen], request, matched)
        if matched < len(blocks):
            self._classify(request, matched, best=max(matches), most=most)
        below = request.input_tokens - min(len(blocks) * size, request.input_tokens)
        result.misses[Miss.BELOW_BLOCK].tokens += below
        share = result.workers[chosen]
        share.requests += 1
        share.computed_tokens += request.input_tokens - hit_tokens
        seen = self._seen
        for block in blocks[matched:]:
            seen[block] = 1
        self._admit(self.caches[chosen], request, matched)
        return hit_tokens

    def invalidate(self, worker: int) -> None:
        """The worker begins a new life, or its cache was reset: everything that it held is gone."""
        self.caches[worker].clear(Departure.INVALIDATED)

    def _admit(self, cache: Cache, request: PrefixRequest, matched: int) -> None:
        if isinstance(cache, EngineModel):
            computed = request.input_tokens + max(0, request.output_tokens - 1)  # the last token is not computed
            full = computed // self._size
            cache.run(
                request.blocks,
                hits=matched,
                answer_blocks=full - request.input_tokens // self._size,
                partial_blocks=-(-computed // self._size) - full,
            )
        else:
            cache.admit(request.blocks, request.at_s)

    def _count_tiers(self, cache: Cache, request: PrefixRequest, matched: int) -> None:
        assert isinstance(cache, Tiered)
        by_tier, size = self.result.hit_tokens_by_tier, self._size
        for depth in range(matched):
            tokens = min((depth + 1) * size, request.input_tokens) - min(depth * size, request.input_tokens)
            tier = cache.tier_of(request.blocks[depth])
            by_tier[tier] = by_tier.get(tier, 0) + tokens

    def _choose(self, request: PrefixRequest, matches: Sequence[int]) -> int:
        if self._router is None:
            return 0
        tokens = request.input_tokens
        missing = [tokens - min(matched * self._size, tokens) for matched in matches]
        return self._router.choose(request, matches, missing)

    def _classify(self, request: PrefixRequest, matched: int, *, best: int, most: int) -> None:
        blocks, seen, misses = request.blocks, self._seen, self.result.misses
        size, tokens = self._size, request.input_tokens
        never_seen = misses[Miss.NEW_SUFFIX if seen[blocks[0]] else Miss.COLD]
        for depth in range(matched, len(blocks)):
            counted = never_seen
            if seen[blocks[depth]]:
                counted = misses[self._why_lost(blocks, depth, best=best, most=most)]
            counted.blocks += 1
            counted.tokens += min((depth + 1) * size, tokens) - min(depth * size, tokens)

    def _why_lost(self, blocks: Sequence[int], depth: int, *, best: int, most: int) -> Miss:
        """What took it; of a block that is still there but behind a hole, what made the hole."""
        if depth >= most:
            return Miss.BELOW_BLOCK
        if depth < best:
            return Miss.OTHER_WORKER
        gone = self._gone
        why = gone.get(blocks[depth])
        if why is None:
            why = next((gone[block] for block in blocks[:depth] if block in gone), Departure.CAPACITY)
        return _MISS_OF[why]

    def _note_gone(self, block: int, why: Departure) -> None:
        self._gone[block] = why
        result = self.result
        match why:
            case Departure.CAPACITY:
                result.evicted_blocks += 1
            case Departure.EXPIRED:
                result.expired_blocks += 1
            case Departure.INVALIDATED:
                result.invalidated_blocks += 1


def run_prefix_caches(
    trace: PrefixTrace, make_cache: MakeCache, router: Router | None = None, *, workers: int = 1
) -> PrefixResult:
    """The whole trace."""
    caches = PrefixCaches(trace, make_cache, router, workers=workers)
    for request in trace.requests:
        caches.serve(request)
    caches.result.check()
    return caches.result


def _matched(cache: Cache, blocks: Sequence[int], most: int) -> int:
    for depth in range(most):
        if blocks[depth] not in cache:
            return depth
    return most
