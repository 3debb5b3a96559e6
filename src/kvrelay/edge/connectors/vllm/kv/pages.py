"""The engine's paged KV memory, seen as bytes: one row per block and layer.

Blocks are only ever moved whole. Inside, their order is the kernel's own (on a CPU with AMX, for instance, keys and
values are packed in tiles), so a part of a block means nothing; what the order is belongs to the contract.

Two kinds with the same outline. `HostPages`: the paged memory is this process's own, rows are copied by numpy, which
lets go of the interpreter meanwhile. `DevicePages`: it is a device's; rows are gathered and scattered there, on a
stream of their own beside the computation, and cross the bus from and to pinned memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Pages(Protocol):
    layers: int
    page_bytes: int

    def empty(self, chunks: int, blocks: int) -> torch.Tensor:
        """Host memory for chunks, uint8 of shape (chunks, layers, blocks, page_bytes), as the copies want it."""
        ...

    def gather(self, layer: int, block_ids: Sequence[int], into: torch.Tensor) -> None:
        """Begins to copy one layer of some blocks to `into`, shape (blocks, page_bytes)."""
        ...

    def scatter(self, layer: int, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Begins to copy one layer of some blocks from `rows`, shape (blocks, page_bytes)."""
        ...

    def finish(self) -> None:
        """Returns when all copies begun by this thread are done."""
        ...


def pages_of(kv_caches: Mapping[str, torch.Tensor]) -> Pages:
    """Raises ValueError for memory that cannot be moved block by block."""
    tensors = list(kv_caches.values())
    if not tensors:
        raise ValueError("the engine registered no KV memory")
    shapes = {(tuple(t.shape), t.dtype, t.device.type) for t in tensors}
    if len(shapes) > 1:
        raise ValueError(f"layers differ in shape, type or device: {sorted(map(str, shapes))}")
    if tensors[0].device.type == "cpu":
        return HostPages(tensors)
    return DevicePages(tensors)


class HostPages:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._rows = [_rows(t).numpy() for t in tensors]
        self.layers, self.page_bytes = len(tensors), self._rows[0].shape[1]

    def empty(self, chunks: int, blocks: int) -> torch.Tensor:
        return torch.empty((chunks, self.layers, blocks, self.page_bytes), dtype=torch.uint8)

    def gather(self, layer: int, block_ids: Sequence[int], into: torch.Tensor) -> None:
        np.take(self._rows[layer], np.asarray(block_ids), axis=0, out=into.numpy(), mode="clip")

    def scatter(self, layer: int, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        target, source = self._rows[layer], rows.numpy()
        for row, block in enumerate(block_ids):
            np.copyto(target[block], source[row])

    def finish(self) -> None:
        """Nothing is under way: these copies are done when they return."""


class DevicePages:
    """Runs on any torch device with streams; on one without (tests), copies happen in order and at once."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._rows = [_rows(t) for t in tensors]
        self._device = tensors[0].device
        self.layers, self.page_bytes = len(tensors), self._rows[0].shape[1]
        self._streams = getattr(torch, self._device.type, None) if self._device.type != "cpu" else None
        self._stream: Any = None if self._streams is None else self._streams.Stream(device=self._device)

    def empty(self, chunks: int, blocks: int) -> torch.Tensor:
        shape = (chunks, self.layers, blocks, self.page_bytes)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._stream is not None)

    def gather(self, layer: int, block_ids: Sequence[int], into: torch.Tensor) -> None:
        if self._streams is None:
            self._gather(layer, block_ids, into)
            return
        self._stream.wait_stream(self._streams.current_stream(self._device))  # the layer must have been written
        with self._streams.stream(self._stream):
            self._gather(layer, block_ids, into)

    def _gather(self, layer: int, block_ids: Sequence[int], into: torch.Tensor) -> None:
        into.copy_(self._rows[layer].index_select(0, self._index(block_ids)), non_blocking=True)

    def scatter(self, layer: int, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        if self._streams is None:
            self._scatter(layer, block_ids, rows)
            return
        with self._streams.stream(self._stream):
            self._scatter(layer, block_ids, rows)

    def _scatter(self, layer: int, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        self._rows[layer].index_copy_(0, self._index(block_ids), rows.to(self._device, non_blocking=True))

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._device)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(blocks, bytes of one block in this layer), sharing the tensor's memory."""
    blocks, page = tensor.shape[0], tensor[0]
    dense = page.numel() == 0 or _is_dense(page)
    if not dense:
        raise ValueError(f"a block of shape {tuple(page.shape)} and strides {page.stride()} is not one piece of memory")
    whole = torch.as_strided(tensor, (blocks, page.numel()), (tensor.stride(0), 1), tensor.storage_offset())
    return whole.view(torch.uint8)


def _is_dense(page: torch.Tensor) -> bool:
    """Whether some order of its dimensions makes the page contiguous: its elements fill one range without holes."""
    expected = 1
    for stride, size in sorted(zip(page.stride(), page.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
