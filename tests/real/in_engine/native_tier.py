"""vLLM's own TieringOffloadingManager over our tier: cascade, promotion, damage; in this process and without a GPU.

native_tier.py MODEL STORE
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from engine import say
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNK_BYTES = 8192
STATED = {
    "weight_quantization": "none",
    "attention_backend": "CPU_ATTN",
    "kernel_layout": "vec",
    "rope_config": "as in config.json",
    "lora_id": "",
    "hash_algorithm": "sha256, PYTHONHASHSEED unset",
}
KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(6)]


class Host:
    """What the engine's connector does with its manager, step by step."""

    def __init__(self, model: str, store: str, **changes: Any) -> None:
        tier = {
            "type": "KvrelayTier",
            "module_path": "kvrelay.edge.connectors.vllm.kv.native_tier",
            "store": {"tiers": [{"url": f"file://{store}"}], "deadline_ms": 2000, "break_even": False},
            "contract": STATED | changes.pop("contract", {}),
            **changes,
        }
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=32, layer_names=("l0", "l1"), group_id=0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": 64 * CHUNK_BYTES, "secondary_tiers": [tier]},
            engine_id=f"test-{uuid.uuid4()}",
            model=OffloadingModelConfig(name=model, dtype="float32"),
            cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
            kv_cache_layout="LBHNC",
        )
        self.manager = TieringOffloadingSpec(config).get_manager()
        self._view = self.manager.primary_tier.get_kv_memoryview()

    def row(self, chunk: int) -> memoryview:
        return self._view.cast("B")[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        time.sleep(0.005)

    def store(self, request: str) -> None:
        """As after a copy from the device into host memory."""
        context = ReqContext(request)
        self.manager.on_new_request(context)
        prepared = self.manager.prepare_store(KEYS, context)
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.row(int(chunk))[:] = content(key)
        self.manager.complete_store(KEYS, context)
        while self.manager.has_pending_work():
            self.manager._maybe_process_finished_jobs()
            self.step()
        self.manager.on_request_finished(context)

    def load(self, request: str) -> tuple[list[str], int]:
        """Looks keys up as the engine does, until each is decided; answers the words, and how many bytes were wrong."""
        context, decided, wrong = ReqContext(request), {}, 0
        self.manager.on_new_request(context)
        deadline = time.monotonic() + 20
        while len(decided) < len(KEYS) and time.monotonic() < deadline:
            for key in KEYS:
                if key not in decided:
                    result = self.manager.lookup(key, context)
                    if result in (LookupResult.HIT, LookupResult.MISS):
                        decided[key] = result.name
            self.step()
        hits = [key for key in KEYS if decided.get(key) == "HIT"]
        if hits:
            spec = self.manager.prepare_load(hits, context)
            for key, chunk in zip(hits, spec.block_ids, strict=True):
                wrong += bytes(self.row(int(chunk))) != content(key)
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return [decided.get(key, "UNDECIDED") for key in KEYS], wrong


def content(key: bytes) -> bytes:
    return bytes([key[0] + 1]) * CHUNK_BYTES


def main(model: str, store: str) -> None:
    results: dict[str, Any] = {}
    writer = Host(model, store)
    writer.store("w")
    results["again"] = writer.load("w2")
    writer.manager.shutdown()

    reader = Host(model, store)
    results["another engine"] = reader.load("r")
    results["from host memory then"] = reader.load("r2")
    reader.manager.shutdown()

    other = Host(model, store, contract={"rope_config": "another"})
    results["another contract"] = other.load("o")
    other.manager.shutdown()

    files = sorted((f for f in Path(store).glob("objects/*/*") if f.is_file()), key=os.path.getmtime)
    damaged = bytearray(files[2].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    files[2].unlink()
    files[2].write_bytes(damaged)
    results["files"] = len(files)
    reader = Host(model, store)
    results["one damaged"] = reader.load("d")
    reader.manager.shutdown()
    try:
        Host(model, store, contract={"rope_config": None})
    except Exception as reason:
        results["without a field"] = str(reason)
    say(results)


if __name__ == "__main__":
    main(*sys.argv[1:3])
