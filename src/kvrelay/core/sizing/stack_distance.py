"""Exact LRU stack distances in one pass (Mattson 1970): from them the hit ratio of every capacity at once.

The distance of a block at a request's arrival is its place in the order of last use, 1 for the block used last; an LRU
cache of C blocks holds it exactly if its distance is at most C. A request uses its chain from the end to the beginning
(as vLLM frees it), so along a chain distances never fall, and the blocks within C are a prefix: counting them gives the
tokens that a prefix cache hits, not only an object cache.

The order is kept in a Fenwick tree over positions of last uses (Bennett, Kruskal 1975; Almasi et al. 2002). Positions
only grow; when they run out they are numbered anew, so the tree is as large as twice the distinct blocks and not as
large as the trace. O(log distinct) per block.

`distances_into` is written over plain indexable numbers so that a compiler for numeric Python can take it as it stands;
with lists it runs in plain Python, right but some hundred times slower.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence


def tree_size(distinct: int, longest_request: int) -> int:
    """Positions that the tree needs: so many that numbering anew is rare."""
    return max(2 * distinct + longest_request, 64)


def distances_into(
    blocks: Sequence[int],
    starts: Sequence[int],
    out: MutableSequence[int],
    last: MutableSequence[int],
    owner: MutableSequence[int],
    tree: MutableSequence[int],
) -> None:
    """Request r has `blocks[starts[r]:starts[r + 1]]`, numbered from 0; `out[i]` becomes the distance of `blocks[i]`, 0
    for a first use.

    Scratch space, all zero: `last` one entry per distinct block; `owner` and `tree` `tree_size(...)` + 1 entries.
    """
    positions = len(tree) - 1
    position = 0
    live = 0
    for request in range(len(starts) - 1):
        begin = starts[request]
        end = starts[request + 1]
        if position + end - begin > positions:
            for i in range(positions + 1):
                tree[i] = 0
            kept = 0
            for i in range(1, position + 1):
                key = owner[i] - 1
                if key >= 0 and last[key] == i:
                    kept += 1
                    owner[kept] = key + 1
                    last[key] = kept
            for i in range(1, kept + 1):
                tree[i] += 1
                above = i + (i & -i)
                if above <= positions:
                    tree[above] += tree[i]
            for i in range(kept + 1, positions + 1):
                above = i + (i & -i)
                if above <= positions:
                    tree[above] += tree[i]
            position = kept
        for i in range(begin, end):
            at = last[blocks[i]]
            if at == 0:
                out[i] = 0
            else:
                older = 0
                while at > 0:
                    older += tree[at]
                    at -= at & -at
                out[i] = live - older + 1
        for i in range(end - 1, begin - 1, -1):
            key = blocks[i]
            at = last[key]
            if at == 0:
                live += 1
            else:
                while at <= positions:
                    tree[at] -= 1
                    at += at & -at
            position += 1
            last[key] = position
            owner[position] = key + 1
            at = position
            while at <= positions:
                tree[at] += 1
                at += at & -at
