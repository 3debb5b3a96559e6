"""What grows has a bound: two hundred times more blocks come and go than ever live at the same time."""

from __future__ import annotations

import resource
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from kvrelay.core.model.events import BlocksRemoved, BlocksStored, KvBatch
from tests.core.routing.rig import SIZE, Rig
from tests.garbage import ours_left_as_garbage

CHAIN, LIVE_CHAINS, CHAINS = 50, 10, 2_000
MOST_GROWTH_MB = 5.0  # 100,000 entries of an index that forgot nothing would take several times as much


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def index_blocks(rig: Rig) -> int:
    return rig.router.status(rig.now).workers[0].targets[0].index_blocks["gpu"]


@pytest.mark.covers("S41")
def test_memory_is_flat_while_blocks_come_and_go():
    rig = Rig()
    rig.join("a")
    worker, live = rig.live_id("a"), deque()
    for number in range(CHAINS):
        if number == CHAINS // 4:
            warm_mb = resident_mb()
        first = number * CHAIN
        tokens = np.arange(first * SIZE, (first + CHAIN) * SIZE, dtype=np.uint32)
        live.append(tuple(range(first, first + CHAIN)))
        gone = (BlocksRemoved(live.popleft()[::-1]),) if len(live) > LIVE_CHAINS else ()
        rig.router.step(rig.now, KvBatch(worker, 0, number, (*gone, BlocksStored(live[-1], None, tokens, SIZE))))
        assert index_blocks(rig) == len(live) * CHAIN
    rig.router.check()
    assert resident_mb() - warm_mb < MOST_GROWTH_MB


@pytest.mark.covers("S41")
def test_what_is_guessed_is_bounded_by_its_cap():
    rig = Rig(max_approximate_blocks=LIVE_CHAINS * CHAIN)
    rig.join("a", sends_events=False)
    for number in range(CHAINS // 4):
        if number == CHAINS // 16:
            warm_mb = resident_mb()
        first = number * CHAIN
        rig.serve(np.arange(first * SIZE, (first + CHAIN) * SIZE, dtype=np.uint32))
        assert index_blocks(rig) == min(number + 1, LIVE_CHAINS) * CHAIN
        rig.effects.clear()
        rig.receipts.clear()
    assert resident_mb() - warm_mb < MOST_GROWTH_MB


@pytest.mark.covers("S41")
@pytest.mark.parametrize("sends_events", [True, False])
def test_workers_that_are_gone_leave_nothing_that_only_the_garbage_collector_could_free(sends_events):
    """The gateway's collector runs rarely: a cycle would keep what each of many lives had remembered."""
    rig = Rig()
    with ours_left_as_garbage() as left:
        for life in range(3):
            rig.join("a", incarnation=str(life), sends_events=sends_events)
            rig.serve(np.arange(CHAIN * SIZE, dtype=np.uint32))
        rig.leave("a")
        rig.effects.clear()
        rig.receipts.clear()
    assert left == {}
