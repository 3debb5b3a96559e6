"""Puts the halves together from the engine's configuration and the user's settings. Needs vLLM and torch."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from kvrelay import __version__
from kvrelay.core.contract.fields import Contract, ContractError
from kvrelay.edge.connectors.vllm.kv.digests import FileDigests
from kvrelay.edge.connectors.vllm.kv.facts import MemoryFacts, adapter_digest, engine_contract, memory_facts
from kvrelay.edge.connectors.vllm.kv.pages import pages_of
from kvrelay.edge.connectors.vllm.kv.records import Records
from kvrelay.edge.connectors.vllm.kv.register import ContractRegister
from kvrelay.edge.connectors.vllm.kv.report import ReportServer
from kvrelay.edge.connectors.vllm.kv.scheduler import Geometry, SchedulerHalf
from kvrelay.edge.connectors.vllm.kv.settings import Epochs, Settings, SettingsError, chunk_blocks, secret_of
from kvrelay.edge.connectors.vllm.kv.staging import Staging
from kvrelay.edge.connectors.vllm.kv.standing import Standing
from kvrelay.edge.connectors.vllm.kv.store import open_store
from kvrelay.edge.connectors.vllm.kv.switch import Switch
from kvrelay.edge.connectors.vllm.kv.tiles import permit_tiles
from kvrelay.edge.connectors.vllm.kv.worker import WorkerHalf
from kvrelay.edge.stores.tiered import ChunkShape

log = logging.getLogger(__name__)


class SchedulerSide:
    """What lives in the scheduler's process."""

    def __init__(self, half: SchedulerHalf, standing: Standing, records: Records, report: ReportServer | None) -> None:
        self.half = half
        self.records = records
        self._standing = standing
        self._report = report
        self._memory: Sequence[MemoryFacts] = ()

    def meet(self, memory: Sequence[MemoryFacts]) -> None:
        """The workers have said what their memory is like; the contract can be formed."""
        self._memory = memory
        self._standing.begin(memory)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """What the engine hands back with an answer that is not streamed."""
        record = self.half.finished(request)
        if record is None:
            return None
        return {"kvrelay": {**record.told(), **self._standing.told()}}

    def reset(self) -> None:
        self.half.forget_saved()
        if self._memory:
            self._standing.begin(self._memory)

    def close(self) -> None:
        self.half.close()
        if self._report is not None:
            self._report.close()


class WorkerSide:
    """What lives in a worker's process."""

    def __init__(self, half: WorkerHalf, memory: MemoryFacts) -> None:
        self.half = half
        self.memory = memory

    def close(self) -> None:
        self.half.close()


def scheduler_side(config: Any, kv_cache_config: Any, settings: Settings) -> SchedulerSide:
    """Raises SettingsError, or what the store's configuration raises."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise SettingsError(
            f"this model has {len(groups)} groups of KV memory (attention of several kinds); this connector knows one. "
            "`--disable-hybrid-kv-cache-manager` makes one of them where the model allows it"
        )
    transfer, block_size = config.kv_transfer_config, config.cache_config.block_size
    block_bytes = len(groups[0].layer_names) * groups[0].kv_cache_spec.page_size_bytes
    blocks = chunk_blocks(settings, block_size_tokens=block_size, block_bytes=block_bytes)
    cache_file = None if settings.digest_cache is None else Path(settings.digest_cache).expanduser()
    digests = FileDigests(cache_file)
    records, secret = Records(), secret_of(settings)
    store = open_store(settings)

    def form(memory: Sequence[MemoryFacts]) -> Contract:
        if len(set(memory)) != 1:
            raise ContractError(f"the {len(memory)} workers of this engine have KV memory of different kinds")
        return engine_contract(
            config,
            memory[0],
            versions=_versions(),
            tenant=settings.tenant,
            digests=digests,
            stated=settings.contract,
        )

    standing = Standing(
        form,
        tenant=settings.tenant,
        secret=secret,
        epochs=Epochs(settings),
        adapter_digest=lambda path: adapter_digest(path, digests),
        compare=ContractRegister(store, tenant=settings.tenant, secret=secret).join,
    )
    switch = Switch()
    half = SchedulerHalf(
        geometry=Geometry(block_size, blocks, blocks * block_bytes, config.parallel_config.world_size),
        loads=transfer.is_kv_consumer,
        saves=transfer.is_kv_producer,
        store=store,
        namespace_of=standing.namespace_of,
        records=records,
        lookup_deadline_ms=settings.lookup_deadline_ms,
        save_generated=settings.save_generated,
        switch=switch,
    )
    if transfer.kv_load_failure_policy == "fail":
        log.warning("kv_load_failure_policy is `fail`, the engine's default: KV that cannot be loaded ends its request")
    about = {"load_failure_policy": transfer.kv_load_failure_policy, "versions": _who_moves_kv()}
    report = (
        None if settings.report is None else ReportServer(settings.report, records, standing, switch, settings=about)
    )
    return SchedulerSide(half, standing, records, report)


def worker_side(config: Any, kv_caches: Mapping[str, Any], settings: Settings) -> WorkerSide:
    """Raises ValueError for memory that cannot be moved block by block."""
    parallel, block_size = config.parallel_config, config.cache_config.block_size
    pages = pages_of(kv_caches)
    memory = memory_facts(kv_caches, config.compilation_config.static_forward_context)
    permit_tiles(memory.kernel)
    blocks = chunk_blocks(settings, block_size_tokens=block_size, block_bytes=pages.layers * pages.page_bytes)
    half = WorkerHalf(
        pages=pages,
        layer_names=memory.layer_names,
        shape=_shape(memory, blocks, block_size),
        staging=Staging(pages, blocks, settings.staging_mb << 20),
        store=open_store(settings),
        rank=parallel.rank,
        ranks=parallel.world_size,
        load_threads=settings.load_threads,
        save_threads=settings.save_threads,
    )
    return WorkerSide(half, memory)


def _shape(memory: MemoryFacts, chunk_blocks: int, block_size_tokens: int) -> ChunkShape:
    layers = len(memory.layer_names)
    return ChunkShape(
        tokens=chunk_blocks * block_size_tokens,
        payload_bytes=layers * chunk_blocks * memory.page_bytes,
        layers=layers,
        dtype=memory.dtype,
        shape=(layers, chunk_blocks, memory.page_bytes),
    )


def _who_moves_kv() -> dict[str, str]:
    """We, the engine, and what else of the kind is installed beside it."""
    versions = {"kvrelay": __version__, "vllm": _versions()["vllm"]}
    try:
        return {**versions, "lmcache": metadata.version("lmcache")}
    except metadata.PackageNotFoundError:
        return versions


def _versions() -> dict[str, str]:
    import torch
    import vllm

    versions = {"vllm": str(vllm.__version__), "torch": str(torch.__version__), "machine": platform.machine()}
    for name in ("flash-attn", "flashinfer-python", "triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
