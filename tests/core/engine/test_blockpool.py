"""The block pool against a naive model, equal after every step; and the rules that vLLM users rely on."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.core.engine.blockpool import Block, BlockPool
from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, KvEvent


class NaivePool:
    """Lists of ids and nothing clever: `free` is the queue, `names` what each block carries, oldest name first."""

    def __init__(self, blocks: int) -> None:
        self.free = list(range(blocks))
        self.references = [0] * blocks
        self.names: list[tuple[int, int]] = []  # (name, block id) in the order of naming
        self.changes: list[KvEvent] = []

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            for entry in [entry for entry in self.names if entry[1] == block_id]:
                self.names.remove(entry)
                self.changes.append(BlocksRemoved((entry[0],)))
            self.references[block_id] = 1
        return taken

    def touch(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if block_id in self.free:
                self.free.remove(block_id)
            self.references[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        named = {block_id for _, block_id in self.names}
        nameless = []
        for block_id in block_ids:
            self.references[block_id] -= 1
            if self.references[block_id] == 0:
                (self.free if block_id in named else nameless).append(block_id)
        self.free = nameless + self.free

    def find(self, name: int) -> int | None:
        return next((block_id for known, block_id in self.names if known == name), None)

    def clear(self) -> bool:
        if any(self.references):
            return False
        self.names.clear()
        self.changes.append(BlocksCleared())
        return True


class PoolMachine(RuleBasedStateMachine):
    """Requests take, name, share and give back blocks in any order."""

    @initialize(blocks=st.integers(1, 12))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.naive = NaivePool(blocks)
        self.tables: list[list[Block]] = []

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.naive.free)))
        taken = self.pool.take(count)
        assert [block.block_id for block in taken] == self.naive.take(count)
        self.tables.append(taken)

    @rule(data=st.data(), name=st.integers(0, 5))
    def give_name(self, data: st.DataObject, name: int) -> None:
        nameless = [block for table in self.tables for block in table if block.name is None]
        if nameless:
            block = data.draw(st.sampled_from(nameless))
            self.pool.give_name(block, name, payload=b"payload")
            self.naive.names.append((name, block.block_id))

    @rule(names=st.lists(st.integers(0, 5), max_size=4))
    def hit(self, names: list[int]) -> None:
        hits = [block for name in names if (block := self.pool.find(name)) is not None]
        expected = [block_id for name in names if (block_id := self.naive.find(name)) is not None]
        assert [block.block_id for block in hits] == expected
        self.pool.touch(hits)
        self.naive.touch(expected)
        self.tables.append(hits)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(reversed(table))
        self.naive.release([block.block_id for block in reversed(table)])

    @rule()
    def clear(self) -> None:
        assert self.pool.clear() == self.naive.clear()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([block for table in self.tables for block in table])
        assert [block.block_id for block in self.pool._free] == self.naive.free
        assert [block.references for block in self.pool.blocks] == self.naive.references
        carried = {(block.name, block.block_id) for block in self.pool.named()}
        assert carried == set(self.naive.names)
        assert self.pool.take_changes() == tuple(self.naive.changes)
        self.naive.changes.clear()


PoolMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPoolAgainstNaiveModel = PoolMachine.TestCase


def named(pool: BlockPool, names: list[int]) -> list[Block]:
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.give_name(block, name, b"payload")
    return blocks


def test_a_freed_block_stays_findable_until_it_is_handed_out_again() -> None:
    pool = BlockPool(3)
    blocks = named(pool, [1, 2, 3])
    pool.release(reversed(blocks))
    assert pool.take_changes() == ()
    assert [pool.find(name) for name in (1, 2, 3)] == blocks
    pool.take(1)
    assert pool.take_changes() == (BlocksRemoved((3,)),)  # the tail of the chain goes first
    assert pool.find(3) is None and pool.find(1) is blocks[0]


def test_every_removal_is_an_event_of_its_own() -> None:
    pool = BlockPool(2)
    pool.release(reversed(named(pool, [1, 2])))
    pool.take(2)
    assert pool.take_changes() == (BlocksRemoved((2,)), BlocksRemoved((1,)))


@pytest.mark.covers("S10")
def test_two_copies_of_one_name_are_removed_one_by_one() -> None:
    pool = BlockPool(2)
    first, second = named(pool, [7, 7])
    pool.release([first, second])
    assert pool.find(7) is first
    pool.take(1)
    assert pool.take_changes() == (BlocksRemoved((7,)),)
    assert pool.find(7) is second, "the other copy still serves"
    pool.take(1)
    assert pool.take_changes() == (BlocksRemoved((7,)),)
    assert pool.find(7) is None


@pytest.mark.covers("S10")
def test_the_younger_copy_can_go_first() -> None:
    pool = BlockPool(2)
    first, second = named(pool, [7, 7])
    pool.release([second])
    assert pool.take(1) == [second]
    assert pool.take_changes() == (BlocksRemoved((7,)),)
    assert pool.find(7) is first


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(2)
    (held,) = named(pool, [1])
    assert pool.free_blocks == 1
    with pytest.raises(AssertionError, match="2 blocks asked, 1 free"):
        pool.take(2)
    pool.take(1)
    assert pool.find(1) is held


def test_a_hit_takes_its_block_out_of_the_middle_of_the_queue() -> None:
    pool = BlockPool(3)
    pool.release(named(pool, [1, 2, 3]))
    hit = pool.find(2)
    assert hit is not None
    pool.touch([hit])
    assert [block.name for block in pool.take(2)] == [None, None]
    assert pool.take_changes() == (BlocksRemoved((1,)), BlocksRemoved((3,)))


def test_clear_fails_while_any_block_is_held() -> None:
    pool = BlockPool(2)
    blocks = named(pool, [1])
    assert not pool.clear()
    assert pool.take_changes() == () and pool.find(1) is blocks[0]
    pool.release(blocks)
    assert pool.clear()
    assert pool.take_changes() == (BlocksCleared(),)
    assert pool.find(1) is None


def test_check_notices_a_lost_reference() -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(AssertionError, match="references of block 0"):
        pool.check(held=[])
