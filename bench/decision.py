"""How long does one routing decision take, and does dropping a worker ever stop the loop?

128k-token prompt, 512 workers, a million blocks indexed, policy cache_load with the predict scorer; hashing apart. The
ceiling beside the decision is what 512 candidates cost in bare numpy (one gather and one subtraction for each of eight
columns): below it no vectorised scorer can go.
"""

from __future__ import annotations

import time

import numpy as np

from bench.figure import Figure
from kvrelay.core.model.effects import Dispatch
from kvrelay.core.model.events import (
    BlocksStored,
    FirstTokenSeen,
    KvBatch,
    ReplayArrived,
    RequestArrived,
    RequestFinished,
    WokeUp,
    WorkerJoined,
    WorkerLeft,
    WorkerSpec,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.prompt import BlockKeys, Prompt, TokenIds, Usage
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings

WORKERS, BLOCKS, PROMPT_TOKENS, BLOCK_SIZE = 512, 1_000_000, 131_072, 16
DROPPED_BLOCKS = 500_000


def run() -> list[Figure]:
    rng = np.random.default_rng(7)
    prompt = rng.integers(0, 128_000, PROMPT_TOKENS, dtype=np.uint32)
    router, ingest_us = _fleet(rng, prompt)
    hashing_us, keys = _hashing(router, prompt)
    decisions_us = _decisions(router, keys)
    ceiling_us = _bare_numpy_us()
    drop_ms, worst_turn_ms = _drop(rng)
    p50, p99 = np.percentile(decisions_us, [50, 99])
    return [
        Figure("decision p50, 128k tokens, 512 workers, 1M blocks", float(p50), "us", 150.0, ceiling_us, "bare numpy"),
        Figure("decision p99", float(p99), "us", None, ceiling_us, "bare numpy"),
        Figure("hashing of the prompt", hashing_us / PROMPT_TOKENS * 1000, "ns/token", None, None, None),
        Figure("event ingest, decoded to indexed", ingest_us, "us/block", None, None, None),
        Figure("dropping a worker with 500,000 blocks: the drop", drop_ms, "ms", 10.0, None, None),
        Figure("dropping it: longest turn of the sweep", worst_turn_ms, "ms", 10.0, None, None),
    ]


def _fleet(rng: np.random.Generator, prompt: TokenIds) -> tuple[Router, float]:
    """Every worker holds a short common head; a quarter of them hold more of the prompt, up to nearly all of it."""
    router = Router(RouterSettings(key_seed=b"bench"))
    workers = [_join(router, f"w{i}", BLOCK_SIZE) for i in range(WORKERS)]
    started, stored = time.process_time(), 0
    for i, worker in enumerate(workers):
        shared = int(rng.choice([100, 1_000, 4_000, 8_000])) if i % 4 == 0 else 64
        own = rng.integers(0, 128_000, max(0, BLOCKS // WORKERS - shared) * BLOCK_SIZE, dtype=np.uint32)
        stored += _store(router, rng, worker, np.concatenate([prompt[: shared * BLOCK_SIZE], own]))
    return router, (time.process_time() - started) / stored * 1e6


def _join(router: Router, name: str, block_size: int) -> WorkerId:
    worker = WorkerId(name, "1")
    router.step(0.0, WorkerJoined(worker, WorkerSpec(url="http://127.0.0.1:1", block_size_tokens=block_size)))
    router.step(0.0, ReplayArrived(worker, 0, ()))
    return worker


def _store(router: Router, rng: np.random.Generator, worker: WorkerId, tokens: TokenIds, batch: int = 64) -> int:
    """Announce a chain the way an engine does: some blocks per step, each batch naming its parent."""
    count = len(tokens) // BLOCK_SIZE
    hashes = [int(h) for h in rng.integers(1, 2**63, count)]
    for seq, start in enumerate(range(0, count, batch)):
        chunk = tuple(hashes[start : start + batch])
        piece = tokens[start * BLOCK_SIZE : (start + len(chunk)) * BLOCK_SIZE]
        parent = hashes[start - 1] if start else None
        router.step(0.0, KvBatch(worker, 0, seq, (BlocksStored(chunk, parent, piece, BLOCK_SIZE),)))
    return count


def _hashing(router: Router, prompt: TokenIds) -> tuple[float, BlockKeys]:
    samples = []
    for _ in range(20):
        started = time.perf_counter()
        keys = router.keyer.prompt_keys(prompt, BLOCK_SIZE)
        samples.append((time.perf_counter() - started) * 1e6)
    return float(np.median(samples)), keys


def _decisions(router: Router, keys: BlockKeys) -> list[float]:
    samples = []
    for i in range(1_000):
        now, request_id = 1.0 + i, f"r{i}"
        arrived = RequestArrived(request_id, Prompt(PROMPT_TOKENS, {BLOCK_SIZE: keys}), draw=i)
        started = time.perf_counter()
        effects = router.step(now, arrived)
        samples.append((time.perf_counter() - started) * 1e6)
        assert isinstance(effects[0], Dispatch)
        router.step(now + 0.5, FirstTokenSeen(request_id))
        router.step(now + 0.6, RequestFinished(request_id, 200, Usage(PROMPT_TOKENS, 1, 1_024)))
    return samples


def _bare_numpy_us() -> float:
    slots = np.arange(WORKERS)
    columns = [np.random.default_rng(i).random(WORKERS) for i in range(8)]
    samples = []
    for _ in range(300):
        started = time.perf_counter()
        total = columns[0][slots]
        for column in columns[1:]:
            total = total - column[slots]
        total.argmin()
        samples.append((time.perf_counter() - started) * 1e6)
    return float(np.median(samples))


def _drop(rng: np.random.Generator) -> tuple[float, float]:
    """Time of the drop itself, and of the longest of the small steps that give the memory back."""
    router = Router(RouterSettings(key_seed=b"bench"))
    worker = _join(router, "big", BLOCK_SIZE)
    _store(router, rng, worker, rng.integers(0, 128_000, DROPPED_BLOCKS * BLOCK_SIZE, dtype=np.uint32), 1_000)
    started = time.perf_counter()
    router.step(1.0, WorkerLeft("big"))
    drop_ms = (time.perf_counter() - started) * 1e3
    worst_ms = 0.0
    while router.status(1.0).index_blocks:
        started = time.perf_counter()
        router.step(1.0, WokeUp())
        worst_ms = max(worst_ms, (time.perf_counter() - started) * 1e3)
    return drop_ms, worst_ms
