"""Paged blocks as vLLM keeps them: reference counts, a free queue in LRU order, eviction only on re-use.

A block that nobody references stays findable: it waits in the free queue with its name and its payload. It loses them
only when the queue's head reaches it and it is handed out for other data ("lazy eviction"), so BlockRemoved comes
with the batch that needed the space and never earlier. Two blocks may carry one name: a prompt that is a whole number
of blocks computes its last block again on a full hit. Keeping both (rather than folding them) lets a block table only
ever grow at its end; each copy is announced and removed on its own.

Invariants: a block is in the free queue exactly when its reference count is 0; a name maps to the blocks that carry
it, in the order in which they got it; no name is empty of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, KvEvent


class Block:
    """One physical block. `name` is the look-up hash, None while the block is not full or not cached."""

    __slots__ = ("block_id", "name", "next_free", "payload", "previous_free", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.name: int | None = None
        self.payload = b""
        self.references = 0
        self.previous_free: Block | None = None
        self.next_free: Block | None = None


class FreeQueue:
    """A doubly linked list through the blocks themselves: a hit takes its block out of the middle in constant time."""

    def __init__(self) -> None:
        self._head = Block(-1)
        self._tail = Block(-2)
        self._head.next_free = self._tail
        self._tail.previous_free = self._head
        self.count = 0

    def append(self, block: Block) -> None:
        last = self._tail.previous_free
        assert last is not None and block.next_free is None, f"block {block.block_id} is already queued"
        last.next_free = block
        block.previous_free = last
        block.next_free = self._tail
        self._tail.previous_free = block
        self.count += 1

    def prepend(self, block: Block) -> None:
        first = self._head.next_free
        assert first is not None and block.next_free is None, f"block {block.block_id} is already queued"
        first.previous_free = block
        block.next_free = first
        block.previous_free = self._head
        self._head.next_free = block
        self.count += 1

    def remove(self, block: Block) -> None:
        before, after = block.previous_free, block.next_free
        assert before is not None and after is not None, f"block {block.block_id} is not queued"
        before.next_free = after
        after.previous_free = before
        block.previous_free = block.next_free = None
        self.count -= 1

    def pop(self) -> Block:
        block = self._head.next_free
        assert block is not None and block is not self._tail, "the free queue is empty"
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free


class BlockPool:
    """All blocks of one worker, and what it has to announce about them since the last `take_changes`."""

    def __init__(self, blocks_total: int) -> None:
        self.blocks = tuple(Block(i) for i in range(blocks_total))
        self._free = FreeQueue()
        self._named: dict[int, list[Block]] = {}
        self._changes: list[KvEvent] = []
        for block in self.blocks:
            self._free.append(block)

    @property
    def free_blocks(self) -> int:
        """Blocks nobody references, cached ones included."""
        return self._free.count

    @property
    def used_ratio(self) -> float:
        return 1.0 - self._free.count / len(self.blocks)

    def find(self, name: int) -> Block | None:
        """The oldest block of that name; the answer is good until the next `take`."""
        copies = self._named.get(name)
        return copies[0] if copies else None

    def named(self) -> Iterator[Block]:
        """Every findable block, in the order in which the names appeared."""
        for copies in self._named.values():
            yield from copies

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more reference to each; an idle block leaves the free queue."""
        for block in blocks:
            if block.references == 0:
                self._free.remove(block)
            block.references += 1

    def take(self, count: int) -> list[Block]:
        """Hand out `count` blocks with one reference each, evicting from the head of the queue. The caller checks
        `free_blocks` first."""
        assert count <= self._free.count, f"{count} blocks asked, {self._free.count} free"
        taken = []
        for _ in range(count):
            block = self._free.pop()
            self._evict(block)
            block.references = 1
            taken.append(block)
        return taken

    def release(self, blocks: Iterable[Block]) -> None:
        """One reference less to each; the ones nobody holds queue up in the order given. Those without a name are of no
        use to anybody and are taken first, as in vLLM."""
        nameless: list[Block] = []
        for block in blocks:
            assert block.references > 0, f"block {block.block_id} is released without a reference"
            block.references -= 1
            if block.references == 0:
                if block.name is None:
                    nameless.append(block)
                else:
                    self._free.append(block)
        for block in reversed(nameless):
            self._free.prepend(block)

    def give_name(self, block: Block, name: int, payload: bytes) -> None:
        """The block is full and computed: others may find it from now on."""
        assert block.name is None and block.references > 0, f"block {block.block_id} cannot be named"
        block.name = name
        block.payload = payload
        self._named.setdefault(name, []).append(block)

    def announce(self, event: KvEvent) -> None:
        self._changes.append(event)

    def take_changes(self) -> tuple[KvEvent, ...]:
        """What happened to names since the last call, in order."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    def clear(self) -> bool:
        """Forget every name; False, and nothing changes, while any block is held."""
        if self._free.count != len(self.blocks):
            return False
        for copies in self._named.values():
            for block in copies:
                block.name = None
                block.payload = b""
        self._named.clear()
        self.announce(BlocksCleared())
        return True

    def check(self, held: Sequence[Block]) -> None:
        """Invariants; `held` lists every reference that requests have, with repetitions."""
        counts: dict[int, int] = {}
        for block in held:
            counts[block.block_id] = counts.get(block.block_id, 0) + 1
        queued = [block.block_id for block in self._free]
        assert len(queued) == len(set(queued)) == self._free.count, f"free queue is inconsistent: {queued}"
        idle = set(queued)
        for block in self.blocks:
            assert block.references == counts.get(block.block_id, 0), f"references of block {block.block_id}"
            assert (block.references == 0) == (block.block_id in idle), f"block {block.block_id} is half free"
            if block.name is not None:
                assert block in self._named[block.name], f"block {block.block_id} cannot be found"
        for name, copies in self._named.items():
            assert copies and all(block.name == name for block in copies), f"name {name} is stale"

    def _evict(self, block: Block) -> None:
        if block.name is None:
            return
        copies = self._named[block.name]
        copies.remove(block)
        if not copies:
            del self._named[block.name]
        self.announce(BlocksRemoved((block.name,)))
        block.name = None
        block.payload = b""
