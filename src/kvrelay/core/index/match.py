"""How deep does each holder match a prompt? Found by halving, for all holders at once.

`masks` maps a block key to an int whose bit s says that holder s has the block. Along a prompt the set of holders only
shrinks (a holder's depth ends at its first missing block), so the next position at which anybody drops out can be
found by bisection. What a bisection saw beyond that position bounds the next one. Cost: at most (distinct depths) x
log2(blocks) look-ups, against one look-up per block for a scan: about 50 instead of 8,192 for a prompt of 128k tokens.

"Only shrinks" is false for a holder that lacks a block in the middle of a chain it otherwise holds (a hole). The
residency index knows its holes and asks for those holders one by one; see `residency.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.prompt import BlockKeys

Level = tuple[int, int]
"""(bit mask of holders, depth in blocks): these holders match exactly that many blocks."""


def depth_levels(masks: Mapping[int, int], keys: BlockKeys, within: int) -> list[Level]:
    """Levels of all holders in `within` that match at least one block, shallowest first. Pure."""
    blocks = len(keys)
    if not blocks:
        return []
    view, get = keys.data, masks.get  # a memoryview gives plain ints, an array would give numpy scalars
    still = get(view[0], 0) & within
    levels: list[Level] = []
    seen: list[Level] = []  # (holders, position) beyond `depth` where somebody was missing, the nearest last
    depth = 1
    while still and depth < blocks:
        end = blocks
        while seen:
            holders, end = seen[-1]
            if holders & still != still:
                break
            del seen[-1]  # all who are left are there, so they are everywhere before it
            depth, end = end + 1, blocks
        while depth < end:
            middle = (depth + end) >> 1
            holders = get(view[middle], 0)
            if holders & still == still:
                depth = middle + 1
            else:
                seen.append((holders, middle))
                end = middle
        if depth < blocks:
            holders, _ = seen.pop()
            before, still = still, still & holders
            levels.append((before ^ still, depth))
            depth += 1
    if still:
        levels.append((still, blocks))
    return levels


def set_where(array: Ints | Floats, mask: int, value: int) -> None:
    """`array[i] = value` for every set bit i of the mask."""
    if not mask & (mask - 1):
        array[mask.bit_length() - 1] = value
        return
    positions = _positions_of.get(mask)
    if positions is None:
        positions = _unpack(mask)
    array[positions] = value


_positions_of: dict[int, Ints] = {}  # the same groups of workers come up again and again; a pure function, remembered
_MOST_REMEMBERED = 4_096


def _unpack(mask: int) -> Ints:
    packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    positions = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    if len(_positions_of) >= _MOST_REMEMBERED:
        _positions_of.clear()
    _positions_of[mask] = positions
    return positions
