"""The worker's half and both kinds of paged memory, with torch and without an engine.

halves.py
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from engine import say

from kvrelay.core.contract.identity import Namespace
from kvrelay.edge.connectors.vllm.kv.orders import ChunkLoad, Load, Save, StepReports
from kvrelay.edge.connectors.vllm.kv.pages import DevicePages, HostPages, pages_of
from kvrelay.edge.connectors.vllm.kv.staging import Staging
from kvrelay.edge.connectors.vllm.kv.store import Fetched, Found, Places
from kvrelay.edge.connectors.vllm.kv.worker import WorkerHalf
from kvrelay.edge.stores.tiered import ChunkShape

BLOCKS, LAYERS, PER_CHUNK, CHUNKS = 16, 3, 2, 3
NAMESPACE = Namespace(bytes(32), "t", b"", 0)


class Store:
    """Keeps chunks in a dictionary. `broken`: what becomes of a key instead of a hit, or an exception."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.broken: dict[bytes, Any] = {}

    def lookup(self, namespace: Namespace, keys: Sequence[bytes], shape: ChunkShape) -> Found:
        return Found(len(keys))

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        places: Sequence[Places],
        shape: ChunkShape,
        into: Sequence[memoryview],
    ) -> Fetched:
        words = []
        for key, view in zip(keys, into, strict=True):
            word = self.broken.get(key, "hit" if key in self.kept else "miss")
            if isinstance(word, Exception):
                raise word
            view[:] = self.kept[key] if word == "hit" else b"\xee" * len(view)
            words.append(word)
        return Fetched(tuple(words), 1.0, {"t": 1}, {"t": 1.0})

    def save(
        self, namespace: Namespace, key: bytes, shape: ChunkShape, payload: memoryview, *, first_token: int
    ) -> str:
        word = self.broken.get(key, "stored")
        if isinstance(word, Exception):
            raise word
        self.kept[key] = bytes(payload)
        return str(word)

    def observe_prefill(self, tokens: int, ms: float) -> None: ...
    def observe_fetch(self, bytes_by_tier: Mapping[str, int], ms_by_tier: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def caches(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"l{i}": torch.randn(BLOCKS, 2, 4, 8) for i in range(LAYERS)}


def half(memory: dict[str, torch.Tensor], store: Store, limit_bytes: int = 1 << 20) -> WorkerHalf:
    pages = pages_of(memory)
    staging = Staging(pages, PER_CHUNK, limit_bytes)
    shape = ChunkShape(tokens=8, payload_bytes=staging.chunk_bytes, layers=LAYERS, dtype="float32")
    return WorkerHalf(
        pages=pages,
        layer_names=list(memory),
        shape=shape,
        staging=staging,
        store=store,
        rank=0,
        ranks=1,
        load_threads=1,
        save_threads=1,
    )


def ended(worker: WorkerHalf, name: str) -> tuple[set[int], StepReports]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        done, failed = worker.take_ended()
        if name in done:
            return failed, worker.take_reports() or StepReports()
        time.sleep(0.01)
    raise TimeoutError(name)


def same_both_ways() -> bool:
    """Both kinds move the same bytes, also where a block's dimensions lie in another order in memory."""
    plain = list(caches(1).values())
    turned = [torch.empty(BLOCKS, 4, 2, 8).copy_(t.transpose(1, 2)).transpose(1, 2) for t in plain]
    for tensors in (plain, turned):
        host, device = HostPages(tensors), DevicePages(tensors)
        one, other = host.empty(1, 3)[0], device.empty(1, 3)[0]
        for layer in range(LAYERS):
            host.gather(layer, [5, 0, 9], one[layer])
            device.gather(layer, [5, 0, 9], other[layer])
        device.finish()
        if not torch.equal(one, other):
            return False
        before = [t.clone() for t in tensors]
        for layer in range(LAYERS):
            device.scatter(layer, [1, 2, 3], other[layer])
            host.scatter(layer, [10, 11, 12], one[layer])
        for was, now in zip(before, tensors, strict=True):
            if not (torch.equal(now[1:4], was[[5, 0, 9]]) and torch.equal(now[10:13], was[[5, 0, 9]])):
                return False
    return True


def main() -> None:
    keys = [bytes([i]) * 32 for i in range(CHUNKS)]
    store, source = Store(), caches(2)
    writer = half(source, store)
    saves = [Save(NAMESPACE, key, 8 * i, (2 * i, 2 * i + 1)) for i, key in enumerate(keys)]
    writer.begin_saves(saves)
    writer.layer_computed("l0")  # the hooks of the other layers were not called
    writer.step_computed()
    original = {name: tensor.clone() for name, tensor in source.items()}
    for tensor in source.values():
        tensor.zero_()  # the blocks are used for something else before the writes are over
    writer.close()
    saved = writer.take_reports()

    results: dict[str, Any] = {"same both ways": same_both_ways(), "saves": saved.saves if saved else None}
    whole = tuple(ChunkLoad(key, 8 * i, (9 + 2 * i, 10 + 2 * i), (0,)) for i, key in enumerate(keys))
    for case, broken in (
        ("all good", {}),
        ("second corrupt", {keys[1]: "corrupt"}),
        ("first missing", {keys[0]: "miss"}),
        ("store raises", {keys[2]: RuntimeError("a mistake")}),
    ):
        store.broken = broken
        target = caches(3)
        untouched = {name: tensor.clone() for name, tensor in target.items()}
        reader = half(target, store)
        reader.begin_loads([Load("r", NAMESPACE, whole, time.monotonic())])
        failed, reports = ended(reader, "r")
        good = [b for b in range(9, 15) if b not in failed]
        results[case] = {
            "failed blocks": sorted(failed),
            "outcome": reports.loads["r"].outcome,
            "faults": reports.faults,
            "right": all(torch.equal(target[n][b], original[n][b - 9]) for n in target for b in good),
            "others untouched": all(torch.equal(target[n][b], untouched[n][b]) for n in target for b in range(9)),
            "failed untouched": all(torch.equal(target[n][b], untouched[n][b]) for n in target for b in failed),
        }
        reader.close()
    store.broken = {}
    part = ChunkLoad(keys[0], 0, (None, 9), (0,))
    target = caches(4)
    reader = half(target, store)
    reader.begin_loads([Load("p", NAMESPACE, (part,), time.monotonic())])
    ended(reader, "p")
    results["a part"] = all(torch.equal(target[n][9], original[n][1]) for n in target)
    reader.close()

    tight = half(caches(5), Store(), limit_bytes=1)
    tight.begin_saves([Save(NAMESPACE, bytes([i]) * 32, 0, (0, 1)) for i in range(4)])
    tight.step_computed()
    tight.close()
    reports = tight.take_reports()
    results["few slots"] = None if reports is None else [reports.saves, len(reports.unsaved)]
    say(results)


if __name__ == "__main__":
    main()
