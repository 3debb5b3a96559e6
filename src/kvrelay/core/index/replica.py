"""What one worker rank holds, block by block, with its tokens: kept by an agent beside the worker.

The router's index keeps keys, which are made with a secret of that router. A replica keeps what keys are made of, so
that any router can build its own from it, whenever it starts. It follows the same events by the same rules as
`residency.py`; `tests/core/index/test_replica.py` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from kvrelay.core.model.census import MASK, Census, mixed
from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from kvrelay.core.model.units import Tier

_FASTEST_FIRST = tuple(Tier)


class _Block(Struct, gc=False):
    parent: int | None
    token_bytes: bytes  # uint32, of this block
    block_size_tokens: int
    adapter: str | None
    salt: str | None
    media: str | None
    copies: tuple[int, ...]  # per tier, as `_FASTEST_FIRST`


RUN_BLOCKS = 500  # at most in one event of a snapshot, so that it can be applied in small steps
_AT = {tier: at for at, tier in enumerate(_FASTEST_FIRST)}
_ONE_COPY = {tier: tuple(int(other is tier) for other in _FASTEST_FIRST) for tier in _FASTEST_FIRST}


class Replica:
    """Bounded: blocks beyond `max_blocks` are not kept, and `overflowed` is True until everything is cleared."""

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[int, _Block] = {}
        self._digest = 0
        self.overflowed = False

    def census(self) -> Census:
        return Census(len(self._blocks), self._digest)

    def clear(self) -> None:
        self._blocks.clear()
        self._digest = 0
        self.overflowed = False

    def apply(self, event: KvEvent) -> None:
        """Let one event count. Never raises for what a worker may send."""
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                for block_hash in event.hashes:
                    self._remove(block_hash, event.tier)
            case BlocksCleared():
                if event.tier is None:
                    self.clear()
                else:
                    self._clear_tier(event.tier)

    def snapshot(self) -> Iterator[BlocksStored]:
        """Events that give an empty index these blocks: chains, parents first, and then the further copies."""
        yield from self._chains()
        for block_hash, block in self._blocks.items():
            fastest = _fastest(block)
            for at, tier in enumerate(_FASTEST_FIRST):
                for _ in range(block.copies[at] - (tier is fastest)):
                    yield _as_event([block_hash], [block], tier)

    # --- events --------------------------------------------------------------------------------------------------

    def _store(self, event: BlocksStored) -> None:
        if event.token_ids is None:
            for block_hash in event.hashes:
                if block_hash in self._blocks:
                    self._count(block_hash, event.tier, 1)
            return
        size, parent = event.block_size_tokens, event.parent
        data = np.ascontiguousarray(event.token_ids, dtype=np.uint32).tobytes()
        one_copy = _ONE_COPY[event.tier]
        for i, block_hash in enumerate(event.hashes):
            if block_hash in self._blocks:
                self._count(block_hash, event.tier, 1)
            else:
                if len(self._blocks) >= self._max_blocks:
                    self.overflowed = True
                    return
                self._blocks[block_hash] = _Block(
                    parent=parent,
                    token_bytes=data[i * size * 4 : (i + 1) * size * 4],
                    block_size_tokens=size,
                    adapter=event.adapter,
                    salt=event.salt,
                    media=event.media[i] if event.media is not None and i < len(event.media) else None,
                    copies=one_copy,
                )
                self._digest = (self._digest + mixed(block_hash)) & MASK
            parent = block_hash

    def _remove(self, block_hash: int, tier: Tier) -> None:
        block = self._blocks.get(block_hash)
        if block is not None and block.copies[_AT[tier]]:
            self._count(block_hash, tier, -1)

    def _clear_tier(self, tier: Tier) -> None:
        at = _AT[tier]
        for block_hash in [h for h, block in self._blocks.items() if block.copies[at]]:
            self._count(block_hash, tier, -self._blocks[block_hash].copies[at])

    def _count(self, block_hash: int, tier: Tier, copies: int) -> None:
        block, at = self._blocks[block_hash], _AT[tier]
        block.copies = (*block.copies[:at], block.copies[at] + copies, *block.copies[at + 1 :])
        self._digest = (self._digest + copies * mixed(block_hash)) & MASK
        if not any(block.copies):
            del self._blocks[block_hash]

    # --- the snapshot --------------------------------------------------------------------------------------------

    def _chains(self) -> Iterator[BlocksStored]:
        """Runs of blocks of which each is the first child of the one before; other children begin runs of their own."""
        children: dict[int, list[int]] = {}
        heads: list[int] = []
        for block_hash, block in self._blocks.items():
            if block.parent is None or block.parent not in self._blocks:
                heads.append(block_hash)
            else:
                children.setdefault(block.parent, []).append(block_hash)
        heads.reverse()
        while heads:
            block_hash = heads.pop()
            run = [block_hash]
            tier = _fastest(self._blocks[block_hash])
            while block_hash in children:
                block_hash, *others = children.pop(block_hash)
                heads += others
                if _fastest(self._blocks[block_hash]) is not tier or len(run) == RUN_BLOCKS:
                    heads.append(block_hash)
                    break
                run.append(block_hash)
            yield _as_event(run, [self._blocks[name] for name in run], tier)


def _fastest(block: _Block) -> Tier:
    return next(tier for tier, copies in zip(_FASTEST_FIRST, block.copies, strict=True) if copies)


def _as_event(hashes: list[int], blocks: list[_Block], tier: Tier) -> BlocksStored:
    first = blocks[0]
    return BlocksStored(
        hashes=tuple(hashes),
        parent=first.parent,
        token_ids=np.frombuffer(b"".join(block.token_bytes for block in blocks), dtype=np.uint32),
        block_size_tokens=first.block_size_tokens,
        adapter=first.adapter,
        salt=first.salt,
        media=tuple(block.media for block in blocks) if any(block.media for block in blocks) else None,
        tier=tier,
    )
