"""A secondary tier for vLLM's own KV offloading: what the engine keeps in host memory goes on into our store, and back.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "KvrelayTier", "module_path": "kvrelay.edge.connectors.vllm.kv.native_tier",
                             "store": {...}, "contract": {...}}]}}'

The engine tells a tier less than a connector: a block is named by the engine's own hash (tokens, salt, media, and an
adapter's *name*), and of its configuration only a part is shown. What is not shown has to be stated in `contract`,
among it `lora_id`, which states that no adapters are served, or which ones; the start fails and names what is missing.

All calls come from the engine's scheduler and return at once; bytes move on threads, between the engine's host memory
and the store. A key that could not be loaded is a miss from then on, for its request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvrelay.core.contract.digest import keyed_digest
from kvrelay.core.contract.fields import Contract
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.connectors.vllm.kv.chain import namespace_for
from kvrelay.edge.connectors.vllm.kv.digests import FileDigests
from kvrelay.edge.connectors.vllm.kv.facts import (
    chat_template_version,
    model_folder,
    tokenizer_digest,
    weights_digest,
)
from kvrelay.edge.connectors.vllm.kv.settings import Settings, secret_of
from kvrelay.edge.connectors.vllm.kv.store import Places, open_store
from kvrelay.edge.stores.tiered import ChunkShape

LOOKUP_DEADLINE_S = 0.5
THREADS = 4
_SIZES = ("tp_size", "pp_size", "pcp_size", "dcp_size")
log = logging.getLogger(__name__)


class KvrelayTier(SecondaryTierManager):
    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        store: dict[str, Any] | None = None,
        config: str | None = None,
        contract: Mapping[str, Any] | None = None,
        tenant: str = "default",
        secret_file: str | None = None,
        epoch: int = 0,
    ) -> None:
        """Raises SettingsError or ContractError, which stop the engine's start."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = Settings(store=store, config=config, tenant=tenant, secret_file=secret_file, epoch=epoch)
        formed = offload_contract(
            offloading_spec.config, dict(contract or {}), tenant=tenant, digests=FileDigests(None)
        )
        self.contract = formed
        self._namespace = namespace_for(
            contract_digest=formed.digest(),
            tenant=tenant,
            secret=secret_of(settings),
            epoch=epoch,
            salt=None,  # is in the engine's hash
            adapter=None,
        )
        facts = offloading_spec.config
        self._shape = ChunkShape(
            tokens=facts.groups[0].tokens_per_block * facts.cache.blocks_per_chunk,
            payload_bytes=self.block_size_bytes,
            layers=sum(len(group.layer_names) for group in facts.groups),
            dtype=facts.model.dtype,
        )
        self._flat = primary_kv_view.cast("B")
        self._store = open_store(settings)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvrelay-tier")
        self._lock = threading.Lock()
        self._ended: list[JobResult] = []
        self._running: set[Future[None]] = set()
        self._answers: dict[str, dict[OffloadKey, Places]] = {}  # by request; no places: it is not there
        self._asked: dict[str, dict[OffloadKey, float]] = {}
        self._unasked: dict[str, list[OffloadKey]] = {}

    # --- look-ups ----------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """RETRY until the background answered or the deadline is over; keys of a request are asked for together."""
        request = req_context.req_id
        with self._lock:
            answer = self._answers.setdefault(request, {}).get(key)
            if answer is not None:
                return LookupResult.HIT if answer else LookupResult.MISS
            asked = self._asked.setdefault(request, {})
            if key not in asked:
                asked[key] = time.monotonic()
                self._unasked.setdefault(request, []).append(key)
            elif time.monotonic() - asked[key] > LOOKUP_DEADLINE_S:
                self._answers[request][key] = ()
                return LookupResult.MISS
        return LookupResult.RETRY

    def on_schedule_end(self, context: Any) -> None:
        with self._lock:
            unasked, self._unasked = self._unasked, {}
        for request, keys in unasked.items():
            self._threads.submit(self._look_up, request, keys)

    def _look_up(self, request: str, keys: Sequence[OffloadKey]) -> None:
        """Keys come in the order of the prompt, and what lies behind a gap is of no use."""
        try:
            found = self._store.lookup(self._namespace, [self._name(key) for key in keys], self._shape)
            places = found.places if found.worthwhile else ()
        except Exception as mistake:
            log.error("a look-up failed: %s", type(mistake).__name__, exc_info=True)
            places = ()
        with self._lock:
            answers = self._answers.get(request)
            if answers is not None:
                for i, key in enumerate(keys):
                    answers.setdefault(key, places[i] if i < len(places) else ())

    # --- transfers ---------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._store_all, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._load_all, job_metadata)

    def _submit(self, work: Any, job: TransferJob) -> None:
        future = self._threads.submit(self._run, work, job)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._running.discard(future)

    def _run(self, work: Any, job: TransferJob) -> None:
        began = time.monotonic()
        keys = list(job.keys)
        try:
            done = work(job.req_context.req_id, keys, [self._row(int(chunk)) for chunk in job.chunk_ids])
        except Exception as mistake:
            log.error("a transfer failed: %s", type(mistake).__name__, exc_info=True)
            done = []
        if job.is_promotion and len(done) < len(keys):
            self._note_missing(job.req_context.req_id, set(keys) - set(done))
        result = JobResult(
            job_id=job.job_id,
            success=len(done) == len(keys),
            successful_keys=tuple(done) or None,
            transfer_time=time.monotonic() - began,
            transfer_bytes=len(done) * self.block_size_bytes,
        )
        with self._lock:
            self._ended.append(result)

    def _row(self, chunk: int) -> memoryview:
        size = self.block_size_bytes
        return self._flat[chunk * size : (chunk + 1) * size]

    def _store_all(self, request: str, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> list[OffloadKey]:
        outcomes = [
            self._store.save(self._namespace, self._name(key), self._shape, row, first_token=0)
            for key, row in zip(keys, rows, strict=True)
        ]
        return [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.STORED.value]

    def _load_all(self, request: str, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> list[OffloadKey]:
        """Straight into the engine's host memory. Rows of keys that are no hit hold anything; the engine drops them."""
        with self._lock:
            answers = self._answers.get(request, {})
            places = [answers.get(key, ()) for key in keys]
        names = [self._name(key) for key in keys]
        fetched = self._store.fetch(self._namespace, names, places, self._shape, rows)
        self._store.observe_fetch(fetched.bytes_by_tier, fetched.ms_by_tier)
        return [key for key, outcome in zip(keys, fetched.outcomes, strict=True) if outcome == Outcome.HIT.value]

    def _note_missing(self, request: str, keys: Iterable[OffloadKey]) -> None:
        with self._lock:
            answers = self._answers.setdefault(request, {})
            for key in keys:
                answers[key] = ()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def has_pending_work(self) -> bool:
        with self._lock:
            return bool(self._running or self._ended)

    def drain_jobs(self) -> None:
        with self._lock:
            running = tuple(self._running)
        wait(running)

    # --- the life of a request, and of the tier ----------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        with self._lock:
            for kept in (self._answers, self._asked, self._unasked):
                kept.pop(req_context.req_id, None)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=True)
        self._store.close()
        self._flat.release()

    def _name(self, key: OffloadKey) -> bytes:
        fields = (("contract", self._namespace.contract_digest), ("epoch", str(self._namespace.epoch).encode()))
        return keyed_digest(self._namespace.tenant_key[:64], (*fields, ("engine_block", bytes(key))))


def offload_contract(facts: Any, stated: Mapping[str, Any], *, tenant: str, digests: FileDigests) -> Contract:
    """From the part of the engine's configuration that tiers are shown. Raises ContractError."""
    import vllm

    folder = model_folder(facts.model.name, None)
    parallel = facts.parallel
    groups = ", ".join(f"{len(group.layer_names)} x {group.tokens_per_block}" for group in facts.groups)
    found: dict[str, object] = {
        "model_revision": None if folder is None else weights_digest(folder, digests),
        "tokenizer_hash": None if folder is None else tokenizer_digest(folder, digests),
        "chat_template_version": None if folder is None else chat_template_version(folder),
        "kv_dtype": facts.model.dtype,
        "block_size": facts.groups[0].tokens_per_block * facts.cache.blocks_per_chunk,
        "layer_layout": f"{facts.kv_cache_layout}/{groups}/{facts.worker_kv_bytes_per_block} bytes",
        "parallel_geometry": " ".join(f"{name}={getattr(parallel, name)}" for name in _SIZES),
        "multimodal_hash": "",  # media are in the engine's hash by content
        "tenant_namespace": tenant,
        "engine_build": f"vllm-{vllm.__version__}/offloading",
    }
    return Contract.from_mapping({**found, **stated}, source="vLLM's offloading, and `contract` of this tier")
