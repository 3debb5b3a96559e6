"""How two engines keep prefixes, block for block. They differ, so neither is "the baseline".

vLLM finds blocks by hash and takes the head of a queue of free ones: least recently freed goes first, one at a time,
and a request's blocks are freed from their end. A block in use is in nobody's way but occupies room, a partial last
block and output blocks too. This is the very block pool of our mock engine.

SGLang keeps a radix tree whose edges are runs of tokens, and evicts whole leaves, least recently used first: a long
leaf goes at once, and an inner edge is safe while anything hangs on it. Modelled with pages of one block.

Both have the same outline. `run(keys, hits=, answer_blocks=, partial_blocks=)` lets a whole request pass: its `hits`
leading blocks are read; its other blocks, those that its answer fills and a partial last one are computed into fresh
room. `too_large`
counts requests that need more than there is, which an engine of this size refuses.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvrelay.core.cachesim.eviction.policy import Departure, OnGone, nobody
from kvrelay.core.engine.blockpool import BlockPool
from kvrelay.core.model.events import BlocksRemoved


class VllmBlocks:
    """One request at a time over `BlockPool`: it takes what it needs, computes, and gives everything back."""

    def __init__(self, capacity: int, on_gone: OnGone = nobody) -> None:
        self.capacity = capacity
        self.too_large = 0
        self._pool = BlockPool(capacity)
        self._answers = 0  # what was generated has names of its own, below 0: no prompt of the trace asks for it
        self._on_gone = on_gone

    def __contains__(self, key: int) -> bool:
        return self._pool.find(key) is not None

    def __len__(self) -> int:
        return sum(1 for block in self._pool.named() if block.name is not None and block.name >= 0)

    def run(self, keys: Sequence[int], *, hits: int, answer_blocks: int = 0, partial_blocks: int = 0) -> None:
        pool = self._pool
        needed = len(keys) + answer_blocks + partial_blocks
        if needed > self.capacity:
            self.too_large += 1
            return
        held = []
        for key in keys[:hits]:
            block = pool.find(key)
            assert block is not None, f"block {key} was matched and is not there"
            held.append(block)
        pool.touch(held)
        held += pool.take(needed - hits)
        answers = range(self._answers - 1, self._answers - 1 - answer_blocks, -1)
        self._answers -= answer_blocks
        for block, key in zip(held[hits:], (*keys[hits:], *answers), strict=False):
            pool.give_name(block, key, b"")
        for event in pool.take_changes():
            if isinstance(event, BlocksRemoved):
                for key in event.hashes:
                    if key >= 0 and key not in self:
                        self._on_gone(key, Departure.CAPACITY)
        pool.release(reversed(held))

    def advance(self, now_s: float) -> None:
        """Nothing expires here."""

    def clear(self, why: Departure) -> None:
        gone = dict.fromkeys(block.name for block in self._pool.named() if block.name is not None and block.name >= 0)
        self._pool.clear()
        self._pool.take_changes()
        for key in gone:
            self._on_gone(key, why)


class _Node:
    """An edge of the tree with the run of keys on it."""

    __slots__ = ("children", "keys", "locked_at", "parent", "used")

    def __init__(self, keys: list[int], parent: _Node | None) -> None:
        self.keys = keys
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.used = 0
        self.locked_at = 0


class SglangRadix:
    """One request at a time: match (which splits an edge), make room by whole leaves, insert."""

    def __init__(self, capacity: int, on_gone: OnGone = nobody) -> None:
        self.capacity = capacity
        self.too_large = 0
        self._on_gone = on_gone
        self._root = _Node([], None)
        self._node_of: dict[int, _Node] = {}
        self._clock = 0

    def __contains__(self, key: int) -> bool:
        return key in self._node_of

    def __len__(self) -> int:
        return len(self._node_of)

    def run(self, keys: Sequence[int], *, hits: int, answer_blocks: int = 0, partial_blocks: int = 0) -> None:
        """What is there already is used, also beyond `hits`: the tree keeps no second copy."""
        fresh = answer_blocks + partial_blocks
        if len(keys) + fresh > self.capacity:
            self.too_large += 1
            return
        self._clock += 1
        node, matched = self._walk(keys)
        self._make_room(len(keys) - hits + fresh, node)
        if matched < len(keys):
            child = _Node(list(keys[matched:]), node)
            child.used = self._clock
            node.children[keys[matched]] = child
            self._node_of.update(dict.fromkeys(child.keys, child))

    def advance(self, now_s: float) -> None:
        """Nothing expires here."""

    def clear(self, why: Departure) -> None:
        gone, self._node_of = self._node_of, {}
        self._root = _Node([], None)
        for key in gone:
            self._on_gone(key, why)

    def _walk(self, keys: Sequence[int]) -> tuple[_Node, int]:
        """Down as far as the keys agree; every edge on the way counts as used now."""
        node, matched = self._root, 0
        while matched < len(keys):
            child = node.children.get(keys[matched])
            if child is None:
                break
            run = 0
            while run < len(child.keys) and matched + run < len(keys) and child.keys[run] == keys[matched + run]:
                run += 1
            if run < len(child.keys):
                child = self._split(child, run)
            child.used = self._clock
            node, matched = child, matched + run
        return node, matched

    def _split(self, node: _Node, run: int) -> _Node:
        """The edge becomes two; the upper one is answered."""
        parent = node.parent
        assert parent is not None and 0 < run < len(node.keys)
        upper = _Node(node.keys[:run], parent)
        upper.used = node.used
        parent.children[upper.keys[0]] = upper
        node.keys, node.parent = node.keys[run:], upper
        upper.children[node.keys[0]] = node
        self._node_of.update(dict.fromkeys(upper.keys, upper))
        return upper

    def _make_room(self, wanted: int, used: _Node) -> None:
        """`used` and what lies above it are locked: the request reads them."""
        missing = wanted - (self.capacity - len(self._node_of))
        if missing <= 0:
            return
        above: _Node | None = used
        while above is not None:
            above.locked_at = self._clock
            above = above.parent
        order = 0
        leaves: list[tuple[int, int, _Node]] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node.locked_at != self._clock:
                leaves.append((node.used, order, node))
                order += 1
        heapq.heapify(leaves)
        while missing > 0 and leaves:
            _, _, leaf = heapq.heappop(leaves)
            missing -= len(leaf.keys)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.keys[0]]
            for key in leaf.keys:
                del self._node_of[key]
                self._on_gone(key, Departure.CAPACITY)
            if not parent.children and parent.parent is not None and parent.locked_at != self._clock:
                heapq.heappush(leaves, (parent.used, order, parent))
                order += 1


EngineModel = VllmBlocks | SglangRadix
ENGINES: dict[str, type[EngineModel]] = {"vllm": VllmBlocks, "sglang": SglangRadix}
