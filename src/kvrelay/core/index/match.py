"""How deep does each holder match a prompt? Found by halving, for all holders at once.

`masks` maps a block key to an int whose bit s says that holder s has the block. Along a prompt the set of holders only
shrinks (a holder's depth ends at its first missing block), so between two positions with equal masks nothing can have
changed and nothing has to be looked up. Cost: (distinct depths) x log2(blocks) look-ups, against one look-up per block
for a scan: about 40 instead of 8,192 for a prompt of 128k tokens.

"Only shrinks" is false for a holder that lacks a block in the middle of a chain it otherwise holds (a hole). The
residency index knows its holes and mends the answer for those holders; see `residency.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvrelay.core.model.arrays import Ints
from kvrelay.core.model.prompt import BlockKeys

Level = tuple[int, int]
"""(bit mask of holders, depth in blocks): these holders match exactly that many blocks."""


def depth_levels(masks: Mapping[int, int], keys: BlockKeys, within: int) -> list[Level]:
    """Levels of all holders in `within` that match at least one block, in no particular order. Pure."""
    blocks = len(keys)
    if not blocks:
        return []
    key_at = keys.item
    first = masks.get(key_at(0), 0) & within
    if not first:
        return []
    last = first & masks.get(key_at(blocks - 1), 0) if blocks > 1 else first
    levels: list[Level] = [(last, blocks)] if last else []
    open_ranges = [(0, first, blocks - 1, last)]
    while open_ranges:
        low, mask_low, high, mask_high = open_ranges.pop()
        lost = mask_low & ~mask_high
        if not lost:
            continue
        if high - low == 1:
            levels.append((lost, low + 1))
            continue
        middle = (low + high) >> 1
        mask_middle = mask_low & masks.get(key_at(middle), 0)
        open_ranges.append((low, mask_low, middle, mask_middle))
        open_ranges.append((middle, mask_middle, high, mask_middle & mask_high))
    return levels


def set_where(array: Ints, mask: int, value: int) -> None:
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
