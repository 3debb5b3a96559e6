"""An engine's scheduler as the connector's half sees it: requests, steps, and a worker whose loads the test decides."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvrelay.core.contract.identity import Namespace
from kvrelay.edge.connectors.vllm.kv.orders import HIT, Load, LoadReport, StepReports
from kvrelay.edge.connectors.vllm.kv.records import Records
from kvrelay.edge.connectors.vllm.kv.scheduler import Geometry, Scheduled, SchedulerHalf
from kvrelay.edge.connectors.vllm.kv.store import Fetched, Found, Places
from kvrelay.edge.stores.tiered import ChunkShape

BLOCK = 4
GEOMETRY = Geometry(block_size_tokens=BLOCK, chunk_blocks=2, chunk_bytes=64)
CHUNK = GEOMETRY.chunk_tokens


class FakeStore:
    """Knows names and nothing else. `slow_s`: how long a look-up takes."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.slow_s = 0.0
        self.worthwhile = True
        self.owed = False
        self.prefills: list[int] = []
        self.fetches: list[Mapping[str, int]] = []

    def lookup(self, namespace: Namespace, keys: Sequence[bytes], shape: ChunkShape) -> Found:
        time.sleep(self.slow_s)
        leading = next((i for i, key in enumerate(keys) if key not in self.there), len(keys))
        places = ((0,),) * leading
        return Found(leading, self.worthwhile, fetch_ms=1.0, recompute_ms=2.0, places=places, owed=self.owed)

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        places: Sequence[Places],
        shape: ChunkShape,
        into: Sequence[memoryview],
    ) -> Fetched:
        raise AssertionError("the scheduler's half moves no bytes")

    def save(
        self, namespace: Namespace, key: bytes, shape: ChunkShape, payload: memoryview, *, first_token: int
    ) -> str:
        raise AssertionError("the scheduler's half moves no bytes")

    def observe_prefill(self, tokens: int, ms: float) -> None:
        self.prefills.append(tokens)

    def observe_fetch(self, bytes_by_tier: Mapping[str, int], ms_by_tier: Mapping[str, float]) -> None:
        self.fetches.append(bytes_by_tier)

    def close(self) -> None: ...


def namespace_of(salt: str | None, adapter: str | None) -> Namespace:
    return Namespace(bytes(32), f"tenant/{salt}", b"key" + (salt or "").encode(), 0, adapter)


def half(store: FakeStore, **changes: Any) -> SchedulerHalf:
    given: dict[str, Any] = {
        "geometry": GEOMETRY,
        "loads": True,
        "saves": True,
        "store": store,
        "namespace_of": namespace_of,
        "records": Records(),
        "lookup_deadline_ms": 1_000.0,
        "save_generated": True,
    }
    return SchedulerHalf(**(given | changes))


def request(tokens: int, *, name: str = "cmpl-r-0-0123abcd", salt: str | None = None, **more: Any) -> Any:
    ids = [7 * i % 101 for i in range(tokens)]
    members: dict[str, Any] = {
        "request_id": name,
        "cache_salt": salt,
        "prompt_embeds": None,
        "prompt_token_ids": ids,
        "all_token_ids": list(ids),
        "num_prompt_tokens": tokens,
        "num_tokens": tokens,
        "mm_features": [],
        "lora_request": None,
    }
    return SimpleNamespace(**(members | more))


def matched(connector: SchedulerHalf, asked: Any, local_tokens: int = 0) -> int:
    """As the engine does it: asks again while the answer is not known."""
    while (tokens := connector.matched(asked, local_tokens)) is None:
        time.sleep(0.001)
    return tokens


def schedule(connector: SchedulerHalf, asked: Any, *, local: int = 0, external: int = 0) -> tuple[Load, ...]:
    """Allocates one block after the other, numbered from 10, and orders the load."""
    blocks = range(10, 10 + -(-asked.num_tokens // BLOCK))
    connector.allocated(asked, blocks, external)
    return connector.orders(()).loads


def step(connector: SchedulerHalf, asked: Any, *, computed: int, new: int) -> list[tuple[int, tuple[int, ...]]]:
    """One step of the request; answers what is saved, as (first token, blocks)."""
    orders = connector.orders([Scheduled(asked.request_id, computed, new)])
    return [(save.first_token, save.block_ids) for save in orders.saves]


def report(connector: SchedulerHalf, asked: Any, chunks: int, outcome: str = HIT) -> None:
    scopes: list[str | None] = ["cluster"] * chunks
    loaded = LoadReport(chunks, chunks * GEOMETRY.chunk_bytes, {"fetch": 1.0}, outcome, {"t": 1}, {"t": 1.0}, scopes)
    connector.reported(StepReports(loads={asked.request_id: loaded}))
