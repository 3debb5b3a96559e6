"""The agent's machine: what a fleet of one worker feeds, and what the agent can say of it then."""

from __future__ import annotations

import pytest

from kvrelay.core.index.agent import Agent, RankState
from kvrelay.core.model.census import Census
from kvrelay.core.model.effects import RequestReplay
from kvrelay.core.model.events import (
    KvBatch,
    LoadReported,
    ProbeAnswered,
    ReplayArrived,
    ReplayUnavailable,
    WorkerJoined,
    WorkerSpec,
)
from kvrelay.core.model.ids import WorkerId
from tests.core.index.worlds import stored

OLD, NEW = WorkerId("w", "1"), WorkerId("w", "2")


def joined(worker: WorkerId, ranks: int = 1) -> WorkerJoined:
    return WorkerJoined(worker, WorkerSpec(url="http://w", ranks=ranks))


def batch(seq, *chains, worker=OLD, rank=0):
    return KvBatch(worker, rank, seq, tuple(stored(chain) for chain in chains))


@pytest.fixture
def agent():
    agent = Agent(max_blocks=100)
    assert agent.step(joined(OLD)) == (RequestReplay(OLD, 0, 0),)
    return agent


def state(agent, rank=0):
    """(last number, blocks, whole)."""
    rank_state = agent.ranks()[rank]
    return rank_state.last_seq, rank_state.census.blocks, rank_state.whole


def test_before_the_worker_has_answered_there_is_nothing_to_say():
    agent = Agent(max_blocks=100)
    assert (agent.ranks(), agent.snapshot(0), agent.worker, agent.worker_up) == ((), (), None, False)
    assert agent.step(batch(0, [1])) == ()


def test_it_is_whole_once_the_worker_has_replayed_everything_or_published_nothing(agent):
    assert agent.ranks() == (RankState(0, -1, Census(), False),)
    agent.step(ReplayArrived(OLD, 0, ()))
    assert agent.ranks() == (RankState(0, -1, Census(), True),)
    agent.step(batch(0, [1, 2]))
    assert state(agent) == (0, 2, True)
    assert [event.hashes for event in agent.snapshot(0)] == [stored([1, 2]).hashes]


def test_a_gap_is_replayed(agent):
    agent.step(ReplayArrived(OLD, 0, (batch(0, [1]),)))
    assert agent.step(batch(2, [3])) == (RequestReplay(OLD, 0, 1),)
    agent.step(ReplayArrived(OLD, 0, (batch(1, [2]), batch(2, [3]))))
    assert state(agent) == (2, 3, True)


def test_a_gap_without_replay_leaves_what_follows_and_it_says_that_it_is_not_whole(agent):
    agent.step(ReplayArrived(OLD, 0, (batch(0, [1]),)))
    agent.step(batch(2, [3]))
    agent.step(ReplayUnavailable(OLD, 0, "none"))
    assert state(agent) == (2, 1, False)


def test_more_blocks_than_it_may_keep_make_it_not_whole():
    agent = Agent(max_blocks=2)
    agent.step(joined(OLD))
    agent.step(ReplayArrived(OLD, 0, (batch(0, [1, 2, 3]),)))
    assert state(agent) == (0, 2, False)


@pytest.mark.covers("RT-22")
def test_a_new_life_starts_empty_and_the_old_ones_words_do_not_count(agent):
    agent.step(ReplayArrived(OLD, 0, (batch(0, [1]),)))
    assert agent.step(joined(NEW)) == (RequestReplay(NEW, 0, 0),)
    agent.step(batch(1, [2]))
    agent.step(ReplayArrived(OLD, 0, (batch(0, [1]),)))
    agent.step(ReplayUnavailable(OLD, 0, "gone"))
    assert state(agent) == (-1, 0, False) and agent.worker == NEW


@pytest.mark.covers("S11")
def test_ranks_have_states_of_their_own():
    agent = Agent(max_blocks=100)
    assert agent.step(joined(OLD, ranks=2)) == (RequestReplay(OLD, 0, 0), RequestReplay(OLD, 1, 0))
    for rank in (0, 1):
        agent.step(ReplayArrived(OLD, rank, ()))
    agent.step(batch(0, [1, 2], rank=1))
    agent.step(batch(0, [9], rank=2))
    assert (state(agent, 0), state(agent, 1)) == ((-1, 0, True), (0, 2, True))
    assert len(agent.snapshot(1)) == 1 and agent.snapshot(0) == agent.snapshot(2) == ()


@pytest.mark.covers("DR-07")
def test_it_asks_now_and_then_whether_it_lost_the_last_event_itself(agent):
    agent.step(ReplayArrived(OLD, 0, (batch(0, [1]),)))
    assert agent.check_tails() == (RequestReplay(OLD, 0, 1),)
    assert agent.check_tails() == (), "one question at a time"
    agent.step(batch(2, [3]))
    assert state(agent) == (0, 1, True), "what comes meanwhile waits for its turn"
    agent.step(ReplayArrived(OLD, 0, (batch(1, [2]), batch(2, [3]))))
    assert state(agent) == (2, 3, True)


def test_a_worker_that_does_not_answer_is_asked_rarely_and_nothing_is_taken_for_lost(agent):
    agent.step(ReplayArrived(OLD, 0, (batch(0, [1]),)))
    agent.check_tails()
    agent.step(ReplayUnavailable(OLD, 0, "no answer"))
    assert state(agent) == (0, 1, True)
    assert [len(agent.check_tails()) for _ in range(21)] == [0] * 20 + [1]


def test_whether_the_worker_lives_follows_the_probes(agent):
    assert agent.worker_up
    agent.step(ProbeAnswered(OLD, False, "refused"))
    assert not agent.worker_up
    agent.step(ProbeAnswered(OLD, True))
    assert agent.worker_up and agent.step(LoadReported(OLD)) == ()
