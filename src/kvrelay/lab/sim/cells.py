"""One question to a simulation, as a plain value, and its answer, as another: what a sweep hands to its processes.

Three kinds of questions, and no others:

- capacity: what would caches of this size and eviction have hit? No time, no concurrency (`core/cachesim`).
- routing: where would the product's router have sent the requests, what would have been hit there? (`world.py`)
- events: the same with event streams that are late, lossy, doubled or out of order.

No answer has a field for throughput, latency or anything that follows from them. Virtual time orders events; how long a
GPU takes is not modelled.
"""

from __future__ import annotations

import random
from functools import lru_cache, partial
from pathlib import Path

import msgspec
from msgspec import Struct

from kvrelay.core.cachesim.engines import ENGINES
from kvrelay.core.cachesim.eviction.arc import Arc
from kvrelay.core.cachesim.eviction.belady import Belady, next_uses
from kvrelay.core.cachesim.eviction.fifo import Fifo
from kvrelay.core.cachesim.eviction.lfu import Lfu
from kvrelay.core.cachesim.eviction.lru import Lru
from kvrelay.core.cachesim.eviction.policy import EvictionPolicy, OnGone
from kvrelay.core.cachesim.eviction.s3fifo import S3Fifo
from kvrelay.core.cachesim.eviction.sieve import Sieve
from kvrelay.core.cachesim.eviction.ttl import Ttl
from kvrelay.core.cachesim.misses import Counted, Miss
from kvrelay.core.cachesim.prefix import Cache, PrefixCaches, PrefixResult
from kvrelay.core.cachesim.prefix_trace import PrefixTrace, prefix_trace
from kvrelay.core.cachesim.routers import ROUTERS
from kvrelay.core.cachesim.tiers import Tiered
from kvrelay.core.engine.cost import StepCost
from kvrelay.core.engine.engine import EngineSettings
from kvrelay.core.engine.scheduler import SchedulerLimits
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.core.traces.trace import Trace
from kvrelay.lab.replay.trace_file import TraceFile, bundled_trace, read_trace
from kvrelay.lab.sim.traffic import Traffic
from kvrelay.lab.sim.truth import Truth
from kvrelay.lab.sim.weather import EventWeather
from kvrelay.lab.sim.world import WorkerSetup, World

_LOOKS = 1000  # probes and scrapes of each worker in a whole run: agent sessions pause for hours

EVICTIONS = ("lru", "fifo", "lfu", "arc", "s3fifo", "sieve", "ttl", "belady")
CACHES = (*EVICTIONS, *ENGINES)
SIMPLE_ROUTERS = tuple(ROUTERS)


class Source(Struct, frozen=True):
    """Where the trace is read from; None is the bundled one. Every process reads it by itself."""

    path: str | None
    first_requests: int | None = None  # only the first sessions that hold so many requests


class EventFaults(Struct, frozen=True):
    """What happens to event streams, see `EventWeather`."""

    delay_ms: float = 1.0
    spread_ms: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    replay: bool = True


class Restart(Struct, frozen=True):
    """At this time of the trace, this worker begins a new life with an empty cache."""

    at_s: float
    worker: int


class CapacityCell(Struct, frozen=True, tag="capacity"):
    """`cache` is an eviction policy or an engine model; `blocks` is the room of each worker."""

    source: Source
    cache: str
    blocks: int
    workers: int = 1
    router: str = "round_robin"
    ttl_s: float = 300.0  # of cache `ttl`
    restarts: tuple[Restart, ...] = ()
    lower_blocks: tuple[int, ...] = ()  # room of each worker's lower tiers, nearest first; not for engine models


class RoutingCell(Struct, frozen=True, tag="routing"):
    """The product's router with one policy over mock engines with vLLM's block pool."""

    source: Source
    policy: str
    blocks: int
    workers: int
    seed: int = 1
    scorer: str = "predict"
    prefill_tokens_per_s: float = 20_000.0  # decides only how many requests are under way at once
    max_output_tokens: int = 1
    events: EventFaults = EventFaults()
    restarts: tuple[Restart, ...] = ()


Cell = CapacityCell | RoutingCell


class Share(Struct, frozen=True):
    """One worker's part."""

    requests: int
    computed_tokens: int


class Answer(Struct, frozen=True, kw_only=True):
    """What a cell comes to. Tokens are of prompts. `None`: the question does not arise for this kind of cell."""

    cell: Cell
    requests: int
    input_tokens: int
    hit_tokens: int
    hit_ratio: float
    hit_ratio_second_half: float | None
    missed_tokens: dict[Miss, int]
    missed_blocks: dict[Miss, int]
    expired_blocks: int | None
    evicted_blocks: int | None
    invalidated_blocks: int | None
    too_large_requests: int
    workers: tuple[Share, ...]
    max_over_mean_requests: float
    max_over_mean_computed_tokens: float
    hit_tokens_by_tier: dict[int, int] | None = None  # 0 is the nearest
    claimed_tokens: int | None = None  # what the router believed when it chose
    claimed_not_hit_tokens: int | None = None
    hit_not_claimed_tokens: int | None = None
    route_reasons: dict[str, int] | None = None
    statuses: dict[str, int] | None = None
    reports: dict[str, int] | None = None
    receipts_sha256: str | None = None


def run_cell(encoded: bytes) -> bytes:
    """JSON of a cell in, JSON of its answer out, so that nothing but text goes between processes."""
    cell = msgspec.json.decode(encoded, type=Cell)
    return msgspec.json.encode(answer_cell(cell))


def answer_cell(cell: Cell) -> Answer:
    return _capacity(cell) if isinstance(cell, CapacityCell) else _routing(cell)


@lru_cache(maxsize=2)
def load_source(source: Source) -> TraceFile:
    """Raises what `read_trace` raises."""
    return bundled_trace() if source.path is None else read_trace(Path(source.path))


@lru_cache(maxsize=2)
def cut_trace(source: Source) -> Trace:
    trace = load_source(source).trace
    if source.first_requests is None:
        return trace
    kept, requests = [], 0
    for session in sorted(trace.sessions, key=lambda session: session.start_ms):
        if requests >= source.first_requests:
            break
        kept.append(session)
        requests += len(session.turns)
    return msgspec.structs.replace(trace, sessions=tuple(kept))


@lru_cache(maxsize=2)
def cache_trace(source: Source) -> PrefixTrace:
    return prefix_trace(cut_trace(source))


@lru_cache(maxsize=1)
def _future(source: Source) -> list[list[int]]:
    return next_uses([request.blocks for request in cache_trace(source).requests])


# --- capacity ----------------------------------------------------------------------------------------------------


def _capacity(cell: CapacityCell) -> Answer:
    trace = cache_trace(cell.source)
    router = ROUTERS[cell.router](cell.workers) if cell.workers > 1 else None
    caches = PrefixCaches(trace, partial(_make_cache, cell), router, workers=cell.workers)
    restarts = sorted(cell.restarts, key=lambda restart: restart.at_s, reverse=True)
    for request in trace.requests:
        while restarts and restarts[-1].at_s <= request.at_s:
            caches.invalidate(restarts.pop().worker)
        caches.serve(request)
    result = caches.result
    result.check()
    return _answer(
        cell,
        result.input_tokens,
        result.hit.tokens,
        result.misses,
        tuple(Share(share.requests, share.computed_tokens) for share in result.workers),
        requests=result.requests,
        hit_ratio_second_half=_second_half(result),
        expired_blocks=result.expired_blocks,
        evicted_blocks=result.evicted_blocks,
        invalidated_blocks=result.invalidated_blocks,
        hit_tokens_by_tier=dict(sorted(result.hit_tokens_by_tier.items())) if cell.lower_blocks else None,
        too_large_requests=sum(getattr(cache, "too_large", 0) for cache in caches.caches),
    )


def _make_cache(cell: CapacityCell, on_gone: OnGone) -> Cache:
    if cell.cache in ENGINES:
        return ENGINES[cell.cache](cell.blocks, on_gone)
    if cell.lower_blocks:
        return Tiered(partial(_make_policy, cell), cell.lower_blocks, on_gone)
    return _make_policy(cell, on_gone)


def _make_policy(cell: CapacityCell, on_gone: OnGone) -> EvictionPolicy:
    blocks = cell.blocks
    match cell.cache:
        case "lru":
            return Lru(blocks, on_gone)
        case "fifo":
            return Fifo(blocks, on_gone)
        case "lfu":
            return Lfu(blocks, on_gone)
        case "arc":
            return Arc(blocks, on_gone)
        case "s3fifo":
            return S3Fifo(blocks, on_gone)
        case "sieve":
            return Sieve(blocks, on_gone)
        case "ttl":
            return Ttl(blocks, on_gone, ttl_s=cell.ttl_s)
        case "belady":
            return Belady(blocks, on_gone, future=_future(cell.source))
        case unknown:
            raise ValueError(f"no eviction policy `{unknown}`")


def _second_half(result: PrefixResult) -> float | None:
    tokens = result.input_tokens_second_half
    return round(result.hit_second_half.tokens / tokens, 6) if tokens else None


# --- routing and events ------------------------------------------------------------------------------------------


def _routing(cell: RoutingCell) -> Answer:
    trace = cut_trace(cell.source)
    size = trace.block_size_tokens
    truth = Truth(size)
    world = World(
        [WorkerSetup(name=f"w{number}", engine=_engine(cell, size)) for number in range(cell.workers)],
        settings=RouterSettings(
            policy=cell.policy,
            scorer=cell.scorer,
            initial_prefill_tokens_per_s=cell.prefill_tokens_per_s,
            key_seed=cell.seed.to_bytes(8, "big"),
        ),
        seed=cell.seed,
        weather=_weather(cell),
        interval_s=max(5.0, _span_s(trace) / _LOOKS),
        keep_answers=False,
        insider=truth,
    )
    Traffic(world, trace, seed=cell.seed, max_output_tokens=cell.max_output_tokens).start()
    for restart in cell.restarts:
        world.at(restart.at_s, partial(world.restart, f"w{restart.worker}"))
    world.run()
    world.check()
    truth.result.check()
    shares = {name: [0, 0] for name in world.workers}
    reasons: dict[str, int] = {}
    statuses: dict[str, int] = {}
    claimed = over = under = too_large = 0
    for receipt in world.receipts:
        reasons[receipt.route_reason] = reasons.get(receipt.route_reason, 0) + 1
        statuses[receipt.status] = statuses.get(receipt.status, 0) + 1
        too_large += receipt.http_status == 400
        if receipt.chosen_worker is None or receipt.actual_cached_tokens is None:
            continue
        matched, hit = receipt.matched_tokens_at_route or 0, receipt.actual_cached_tokens
        claimed += matched
        over += max(0, matched - hit)
        under += max(0, hit - matched)
        share = shares[receipt.chosen_worker]
        share[0] += 1
        share[1] += (receipt.prompt_tokens or 0) - hit
    return _answer(
        cell,
        truth.result.input_tokens,
        truth.result.hit_tokens,
        truth.result.misses,
        tuple(Share(*share) for share in shares.values()),
        requests=len(world.receipts),
        too_large_requests=too_large,
        claimed_tokens=claimed,
        claimed_not_hit_tokens=over,
        hit_not_claimed_tokens=under,
        route_reasons=dict(sorted(reasons.items())),
        statuses=dict(sorted(statuses.items())),
        reports=dict(sorted(world.reports.items())),
        receipts_sha256=world.digest(),
    )


def _span_s(trace: Trace) -> float:
    """From the first request to the last, by the trace's own times."""
    times_ms = [session.start_ms + turn.due_ms for session in trace.sessions for turn in session.turns]
    return (max(times_ms) - min(times_ms)) / 1000 if times_ms else 0.0


def _engine(cell: RoutingCell, block_size_tokens: int) -> EngineSettings:
    return EngineSettings(
        block_size_tokens=block_size_tokens,
        blocks=cell.blocks,
        max_model_len=cell.blocks * block_size_tokens,
        limits=SchedulerLimits(token_budget=16_384, max_num_seqs=256),
        cost=StepCost(prefill_tokens_per_s=cell.prefill_tokens_per_s),
    )


def _weather(cell: RoutingCell) -> EventWeather:
    faults = cell.events
    return EventWeather(
        random.Random(f"{cell.seed}/events").random,
        delay_s=faults.delay_ms / 1000,
        spread_s=faults.spread_ms / 1000,
        loss=faults.loss,
        duplication=faults.duplication,
        replay=faults.replay,
    )


def _answer(
    cell: Cell,
    input_tokens: int,
    hit_tokens: int,
    misses: dict[Miss, Counted],
    workers: tuple[Share, ...],
    *,
    hit_ratio_second_half: float | None = None,
    expired_blocks: int | None = None,
    evicted_blocks: int | None = None,
    invalidated_blocks: int | None = None,
    **more: object,
) -> Answer:
    return Answer(
        cell=cell,
        input_tokens=input_tokens,
        hit_tokens=hit_tokens,
        hit_ratio=round(hit_tokens / input_tokens, 6) if input_tokens else 0.0,
        hit_ratio_second_half=hit_ratio_second_half,
        missed_tokens={kind: counted.tokens for kind, counted in misses.items()},
        missed_blocks={kind: counted.blocks for kind, counted in misses.items()},
        expired_blocks=expired_blocks,
        evicted_blocks=evicted_blocks,
        invalidated_blocks=invalidated_blocks,
        workers=workers,
        max_over_mean_requests=_max_over_mean([share.requests for share in workers]),
        max_over_mean_computed_tokens=_max_over_mean([share.computed_tokens for share in workers]),
        **more,  # type: ignore[arg-type]
    )


def _max_over_mean(values: list[int]) -> float:
    return round(max(values) * len(values) / sum(values), 4) if sum(values) else 1.0
