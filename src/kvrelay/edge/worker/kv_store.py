"""The mock worker's connector to a shared store: what a real engine's connector does, with verifiable payloads.

A prompt's whole chunks that are not cached here are looked up and loaded before the request enters the engine; what the
engine computed is stored when the request has ended. Neither ever keeps an answer from being given: whatever goes
wrong, the blocks are computed. The simulated fleet has the same connector, under virtual time (`lab/sim/store.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from msgspec import Struct

from kvrelay.core.contract.fields import Contract
from kvrelay.core.contract.identity import Namespace, block_identities
from kvrelay.core.engine.engine import BlocksLoaded, Finished
from kvrelay.core.engine.payload import PAYLOAD_BYTES
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.edge.stores.config import StoreConfig
from kvrelay.edge.stores.tiered import ChunkShape, FetchOutcome, LookupPlan, StoreOutcome, TieredStore
from kvrelay.edge.worker.engine_host import TokenListener
from kvrelay.edge.worker.kv_loads import SLOWER, LoadReports, not_fetched
from kvrelay.edge.worker.kv_loads import fetched as fetched_load
from kvrelay.edge.worker.spec import MockSpec

Answer = TypeVar("Answer")


class LoadRefused(Exception):
    """The store could not answer, and the failure policy is `fail`: the request is not to be computed instead."""


class Loaded(Struct, frozen=True):
    """What one load brought. `skipped_because`: the plan was not followed, and why."""

    tokens: int = 0
    bytes_read: int = 0
    ms: float = 0.0
    skipped_because: str = ""


def own_contract(spec: MockSpec) -> Contract:
    """What this worker's payloads depend on, with the members that the spec sets otherwise."""
    own = {
        "model_revision": spec.engine_settings().model,
        "weight_quantization": "none",
        "tokenizer_hash": f"mock-{spec.vocab_size}",
        "chat_template_version": "mock",
        "attention_backend": "mock",
        "kv_dtype": "uint8",
        "block_size": spec.block_size_tokens,
        "layer_layout": "1 layer",
        "kernel_layout": "digest",
        "parallel_geometry": "1x1",
        "rope_config": "none",
        "lora_id": "",
        "multimodal_hash": "",
        "tenant_namespace": "default",
        "engine_build": "mock",
        "hash_algorithm": "blake2b",
    }
    return Contract.from_mapping({**own, **spec.contract}, source="the mock worker's options")


def _on_event_loop(future: Future[Answer]) -> Awaitable[Answer]:
    return asyncio.wrap_future(future)


class WorkerStore:
    """One per worker process. Coroutines run on its event loop, bytes move on the store's threads; or both where `wait`
    and `open_store` say. What a coroutine raises is a mistake in here, except for LoadRefused."""

    def __init__(
        self,
        spec: MockSpec,
        *,
        open_store: Callable[[StoreConfig], TieredStore] = TieredStore.open,
        wait: Callable[[Future[Any]], Awaitable[Any]] = _on_event_loop,
    ) -> None:
        assert spec.store is not None
        self.contract = own_contract(spec)
        self._digest = self.contract.digest()
        self._chunk_blocks, self._block_tokens = spec.store_chunk_blocks, spec.block_size_tokens
        config = StoreConfig.from_mapping(spec.store, source="--store")
        self.failure_policy = config.failure_policy
        self.reports = LoadReports()
        self.tiers = open_store(config)
        self._wait = wait
        self.tiers.announce_contract(self.contract, compared=self._compared)
        self._shape = ChunkShape(
            tokens=self._chunk_blocks * self._block_tokens,
            payload_bytes=self._chunk_blocks * PAYLOAD_BYTES,
            layers=1,
            dtype="uint8",
            shape=(self._chunk_blocks, PAYLOAD_BYTES),
        )
        self.shares = True  # an operator's switch; off: the store is neither asked nor given anything
        self.loaded_tokens = self.loaded_bytes = self.stored_chunks = 0
        self.last = Loaded()

    async def load(self, request: EngineRequest, *, cached_blocks: int) -> BlocksLoaded | None:
        """The payloads of the leading chunks, unless what is cached here reaches as far. Raises LoadRefused."""
        if not self.shares:
            return None
        plan = await self._look_up(request, self._keys(request))
        if self.failure_policy == "fail" and plan.unasked:
            raise LoadRefused(f"no answer from {', '.join(plan.unasked)}")
        cached_tokens = cached_blocks * self._block_tokens
        if plan.tokens <= cached_tokens or not plan.fetch:
            load = not_fetched(plan, cached_tokens=cached_tokens)
            self.reports.note(request.request_id, load)
            if load.reason == SLOWER:
                self.last = Loaded(skipped_because=plan.reason)
            return None
        return await self._fetch(plan, request)

    async def save(self, request: EngineRequest, payloads: Sequence[bytes]) -> None:
        """Keep the whole chunks that these leading payloads make."""
        if not self.shares:
            return
        keys = self._keys(request)[: len(payloads) // self._chunk_blocks]
        plan = await self._look_up(request, keys)
        for i in range(len(plan.keys), len(keys)):
            chunk = b"".join(payloads[i * self._chunk_blocks : (i + 1) * self._chunk_blocks])
            done: StoreOutcome = await self._wait(
                self.tiers.store_async(
                    self._namespace(request), keys[i], self._shape, [chunk], start_token=i * self._shape.tokens
                )
            )
            self.stored_chunks += done.stored

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        self.tiers.observe_prefill(tokens, seconds * 1000)

    def state(self) -> dict[str, object]:
        """For tests and drills."""
        return {
            "loaded_tokens": self.loaded_tokens,
            "loaded_bytes": self.loaded_bytes,
            "stored_chunks": self.stored_chunks,
            "last_load_ms": self.last.ms,
            "last_skipped_because": self.last.skipped_because,
            **self.tiers.report(),
        }

    def metrics(self) -> bytes:
        return ("\n".join(self.tiers.metrics()) + "\n").encode()

    def close(self) -> None:
        self.tiers.close()

    async def _look_up(self, request: EngineRequest, keys: Sequence[bytes]) -> LookupPlan:
        plan: LookupPlan = await self._wait(self.tiers.lookup_async(self._namespace(request), keys, self._shape))
        return plan

    async def _fetch(self, plan: LookupPlan, request: EngineRequest) -> BlocksLoaded | None:
        buffers = [bytearray(self._shape.payload_bytes) for _ in plan.keys]
        views = [memoryview(buffer) for buffer in buffers]
        fetched: FetchOutcome = await self._wait(self.tiers.fetch_async(plan, views))
        if fetched.failed:
            raise LoadRefused(", ".join(dict.fromkeys(outcome.value for outcome in fetched.outcomes)))
        usable = b"".join(buffers[: fetched.leading_hits])
        payloads = [usable[at : at + PAYLOAD_BYTES] for at in range(0, len(usable), PAYLOAD_BYTES)]
        tokens = len(payloads) * self._block_tokens
        self.reports.note(request.request_id, fetched_load(plan, fetched))
        self.last = Loaded(tokens, fetched.bytes_read, plan.ms + fetched.ms)
        self.loaded_tokens += tokens
        self.loaded_bytes += fetched.bytes_read
        return BlocksLoaded(request.token_ids, payloads, request.adapter, request.salt)

    def _compared(self, differs: tuple[str, ...]) -> None:
        self.reports.contract_differs = self.reports.contract_differs or differs

    def _keys(self, request: EngineRequest) -> tuple[bytes, ...]:
        """One key per whole chunk: the identity of its last block, which names all before it."""
        identities = block_identities(self._namespace(request), request.token_ids, self._block_tokens)
        return identities[self._chunk_blocks - 1 :: self._chunk_blocks]

    def _namespace(self, request: EngineRequest) -> Namespace:
        salt = request.salt or ""
        return Namespace(self._digest, self.contract.tenant_namespace, salt.encode(), 0, request.adapter)


class StoringReply:
    """Listens in a reply's place: when one of its requests has ended, the worker hears of it first."""

    def __init__(
        self,
        reply: TokenListener,
        requests: Sequence[EngineRequest],
        ended: Callable[[EngineRequest, Finished], None],
    ) -> None:
        self._reply, self._ended = reply, ended
        self._requests = {request.request_id: request for request in requests}

    def on_token(self, request_id: str, token_id: int) -> None:
        self._reply.on_token(request_id, token_id)

    def on_finished(self, finished: Finished) -> None:
        self._ended(self._requests[finished.request_id], finished)
        self._reply.on_finished(finished)
