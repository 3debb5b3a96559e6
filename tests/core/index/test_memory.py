"""Memory of the index and of an agent's replica while blocks come and go without end."""

from __future__ import annotations

import gc
import os
from collections import deque

import numpy as np
import pytest

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.index.replica import Replica
from kvrelay.core.index.residency import Residency
from kvrelay.core.model.events import BlocksRemoved, BlocksStored

SIZE = 4
LIVE_BLOCKS = 10_000
ALL_BLOCKS = 2_000_000
CHAIN_BLOCKS = 500
GROWTH_MB = 50


def resident_mb() -> float:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as page:
        return int(page.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.covers("S41")
def test_memory_is_flat_while_two_million_blocks_pass_and_the_live_count_is_right() -> None:
    index, replica = Residency(Keyer(b"k")), Replica(max_blocks=4 * LIVE_BLOCKS)
    followed_blocks = ALL_BLOCKS // 10  # by the replica, which is slower
    slot = index.add_holder(SIZE)
    live: deque[tuple[int, ...]] = deque()
    chains, warm_mb = ALL_BLOCKS // CHAIN_BLOCKS, 0.0
    for n in range(chains):
        first = n * CHAIN_BLOCKS
        hashes = tuple(range(first + 1, first + CHAIN_BLOCKS + 1))
        tokens = np.arange(first * SIZE, (first + CHAIN_BLOCKS) * SIZE, dtype=np.uint32)
        events: list[BlocksStored | BlocksRemoved] = [BlocksStored(hashes, None, tokens, SIZE)]
        live.append(hashes)
        if len(live) * CHAIN_BLOCKS > LIVE_BLOCKS:
            events.insert(0, BlocksRemoved(live.popleft()[::-1]))
        for event in events:
            index.apply(slot, event)
            if first >= ALL_BLOCKS - followed_blocks:
                replica.apply(event)
        if n == chains // 10:
            warm_mb = resident_mb()
    assert resident_mb() - warm_mb < GROWTH_MB
    assert index.size() == len(live) * CHAIN_BLOCKS == LIVE_BLOCKS
    assert index.census(slot) == replica.census()
    index.check()
