"""A router and the agent beside its worker: what an agent's word leads to, and that the index ends up true."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvrelay.core.index.replica import Replica
from kvrelay.core.model.census import Census
from kvrelay.core.model.effects import Report, RequestReplay, RequestSnapshot
from kvrelay.core.model.events import (
    AgentHeartbeat,
    BlocksRemoved,
    BlocksStored,
    KvBatch,
    ReplayArrived,
    ReplayUnavailable,
    ResidencyReset,
    SnapshotArrived,
    SnapshotUnavailable,
    WokeUp,
    WorkerJoined,
    WorkerSpec,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.units import IndexState
from tests.core.routing.rig import SIZE, Rig, text

A = WorkerId("a", "1")


class Watched(Rig):
    """One worker with an agent. Its events reach the agent always and the router when they are delivered."""

    def __init__(self, *, replay_batches: int = 100, engine: Watched | None = None) -> None:
        """`engine`: another rig whose worker this router joins late."""
        super().__init__(heartbeat_grace_s=0.5, census_interval_s=5.0)
        self.truth = Replica(max_blocks=10_000) if engine is None else engine.truth
        self.published: list[KvBatch] = [] if engine is None else engine.published
        self.replay_batches = replay_batches
        self.agent_answers = True
        self.asked: list[str] = []
        spec = WorkerSpec(url="http://a", block_size_tokens=SIZE, engine="mock", has_agent=True)
        self.step(WorkerJoined(A, spec))

    def step(self, event) -> tuple:
        effects = super().step(event)
        for effect in effects:
            if isinstance(effect, RequestReplay):
                self.asked.append("replay")
                self._answer_replay(effect.from_seq)
            elif isinstance(effect, RequestSnapshot):
                self.asked.append("snapshot")
                self.step(self.snapshot() if self.agent_answers else SnapshotUnavailable(A, 0, "gone"))
        return effects

    def _answer_replay(self, from_seq: int) -> None:
        kept = self.published[-self.replay_batches :] if self.replay_batches else []
        if not self.replay_batches:
            self.step(ReplayUnavailable(A, 0, "none"))
        else:
            self.step(ReplayArrived(A, 0, tuple(batch for batch in kept if batch.seq >= from_seq)))

    def engine_does(self, *events, deliver: bool = True) -> None:
        batch = KvBatch(A, 0, len(self.published), events)
        self.published.append(batch)
        for event in events:
            self.truth.apply(event)
        if deliver:
            self.step(batch)

    def stores(self, n: int, *, deliver: bool = True) -> None:
        tokens = text(n, blocks=2)
        self.engine_does(BlocksStored(self.hashes(tokens), None, tokens, SIZE), deliver=deliver)

    def removes(self, n: int, *, deliver: bool = True) -> None:
        self.engine_does(BlocksRemoved(self.hashes(text(n, blocks=2))[::-1]), deliver=deliver)

    def snapshot(self, **more) -> SnapshotArrived:
        last_seq = len(self.published) - 1
        batches = tuple(KvBatch(A, 0, last_seq, (event,)) for event in self.truth.snapshot())
        return SnapshotArrived(A, 0, last_seq, batches, **more)

    def heartbeat(self, *, after_s: float = 1.0, whole: bool = True, census: Census | None = None) -> tuple:
        self.now += after_s
        census = census or self.truth.census()
        return self.step(AgentHeartbeat(A, 0, len(self.published) - 1, census, whole))

    @property
    def target(self):
        return self.router.status(self.now).workers[0].targets[0]

    @property
    def keeper(self):
        return self.router._keeper

    def is_true(self) -> bool:
        return self.keeper.residency.census(0) == self.truth.census()

    def kinds(self) -> list[str]:
        return [effect.kind for effect in self.effects if isinstance(effect, Report)]


@pytest.mark.covers("S17", "DR-05")
def test_a_router_that_comes_late_has_the_whole_state_from_the_agent_although_the_replay_is_short():
    engine = Watched()
    for n in range(50):
        engine.stores(n)
    router = Watched(replay_batches=3, engine=engine)
    assert router.asked == ["snapshot"]
    assert router.is_true() and router.target.index_state is IndexState.LIVE
    assert router.serve(text(7, blocks=2)).matched_blocks_at_route == 2


def test_without_the_agents_answer_the_replay_is_asked_as_ever():
    rig = Watched()
    assert rig.asked == ["snapshot"] and rig.target.index_state is IndexState.LIVE
    rig.agent_answers = False
    rig.stores(1)
    rig.step(ResidencyReset("a", replay=True))
    assert rig.asked == ["snapshot", "snapshot", "replay"] and rig.is_true()


@pytest.mark.covers("DR-06")
@pytest.mark.parametrize(("replay_batches", "asked"), [(100, ["replay"]), (1, ["replay", "snapshot"])])
def test_a_gap_is_filled_by_the_replay_or_by_the_agent_and_the_index_equals_the_truth(replay_batches, asked):
    rig = Watched(replay_batches=replay_batches)
    rig.asked.clear()
    rig.stores(1)
    rig.removes(1, deliver=False)
    rig.stores(2)
    assert rig.asked == asked and rig.is_true() and rig.target.index_state is IndexState.LIVE
    assert "event_gap_lost" not in rig.kinds()


@pytest.mark.covers("DR-07")
@pytest.mark.parametrize("replay_batches", [100, 0])
def test_a_lost_tail_is_seen_by_the_second_heartbeat_that_names_it(replay_batches):
    rig = Watched(replay_batches=replay_batches)
    rig.stores(1)
    rig.removes(1, deliver=False)
    rig.asked.clear()
    rig.heartbeat()
    assert rig.asked == [] and not rig.is_true(), "the event may be on its way"
    rig.heartbeat()
    assert rig.asked[0] == "replay" and rig.is_true() and rig.target.index_state is IndexState.LIVE
    assert rig.kinds().count("event_tail_lost") == 1


def test_a_heartbeat_that_overtakes_its_event_leads_to_nothing():
    rig = Watched()
    rig.asked.clear()
    for n in range(5):
        rig.stores(n, deliver=False)
        rig.heartbeat(after_s=0.4)
        rig.step(rig.published[-1])
    assert rig.asked == [] and rig.is_true()


def test_an_index_that_differs_at_the_same_number_is_replaced_by_the_snapshot():
    rig = Watched()
    rig.stores(1)
    rig.keeper.residency.apply(0, BlocksRemoved(rig.hashes(text(1, blocks=2))[:1]))  # whatever led to it
    rig.asked.clear()
    effects = rig.heartbeat()
    assert effects[0] == Report("index_drift", "a", "rank 0: 1 blocks, agent 2")
    assert rig.asked == ["snapshot"] and rig.is_true() and rig.target.index_state is IndexState.LIVE


def test_a_difference_that_stays_is_asked_about_ever_more_rarely():
    rig = Watched()
    rig.asked.clear()
    for _ in range(1000):
        rig.heartbeat(census=Census(7, 7))
    assert 4 <= len(rig.asked) <= 10


def test_an_incomplete_index_becomes_whole_when_an_agent_comes():
    rig = Watched(replay_batches=1)
    rig.agent_answers = False
    for n in range(5):
        rig.stores(n)
    rig.step(ResidencyReset("a", replay=True))
    assert rig.target.index_state is IndexState.INCOMPLETE
    rig.agent_answers = True
    rig.heartbeat(whole=False)
    assert rig.target.index_state is IndexState.INCOMPLETE, "this agent has missed something too"
    rig.heartbeat()
    assert rig.target.index_state is IndexState.LIVE and rig.is_true()
    assert "index_drift" not in rig.kinds()


@pytest.mark.covers("DR-08")
def test_when_worker_and_agent_are_gone_the_blocks_go_and_nobody_is_asked_in_a_loop():
    rig = Watched(replay_batches=0)
    rig.stores(1)
    rig.agent_answers = False
    rig.asked.clear()
    rig.stores(2, deliver=False)
    for _ in range(20):
        rig.heartbeat(whole=False)
    assert rig.asked == ["replay", "snapshot"]
    assert rig.target.index_blocks["gpu"] == 0 and rig.target.index_state is IndexState.INCOMPLETE


def test_an_agent_that_stays_silent_is_given_up_in_time():
    rig = Rig(snapshot_timeout_s=5.0)
    rig.step(WorkerJoined(A, WorkerSpec(url="http://a", block_size_tokens=SIZE, has_agent=True)))
    rig.now += 5.1
    assert RequestReplay(A, 0, 0) in rig.step(WokeUp())


def test_a_large_snapshot_is_applied_in_steps():
    rig = Watched()
    for n in range(900):
        rig.stores(n, deliver=False)
    rig.step(ResidencyReset("a", replay=True))
    assert rig.target.index_state is IndexState.INCOMPLETE and rig.target.index_blocks["gpu"] < 1100
    while rig.target.index_state is IndexState.INCOMPLETE:
        rig.step(WokeUp())
    assert rig.is_true() and rig.target.index_blocks["gpu"] == 1800


def test_the_word_of_an_agent_about_events_that_nobody_follows_changes_nothing():
    rig = Rig()
    rig.join("a", sends_events=False, has_agent=True)
    assert rig.step(AgentHeartbeat(A, 0, 7, Census(), True)) == ()
    assert rig.step(AgentHeartbeat(WorkerId("a", "gone"), 0, 7, Census(), True))[0].kind == "event_late"


class LossyEvents(RuleBasedStateMachine):
    """Events come, are lost or come twice; the naive model is the set of prompts that the engine holds."""

    prompts = st.integers(0, 5)

    @initialize(replay_batches=st.integers(0, 4))
    def begin(self, replay_batches):
        self.rig = Watched(replay_batches=replay_batches)
        self.held = set()

    @rule(n=prompts, deliver=st.booleans())
    def engine_stores(self, n, deliver):
        if n not in self.held:
            self.held.add(n)
            self.rig.stores(n, deliver=deliver)

    @rule(n=prompts, deliver=st.booleans())
    def engine_removes(self, n, deliver):
        if n in self.held:
            self.held.remove(n)
            self.rig.removes(n, deliver=deliver)

    @rule(data=st.data())
    def an_old_event_comes_again(self, data):
        if self.rig.published:
            self.rig.step(data.draw(st.sampled_from(self.rig.published)))

    @rule(answers=st.booleans())
    def the_agent_comes_or_goes(self, answers):
        self.rig.agent_answers = answers

    @rule()
    def heartbeats_come_for_a_while(self):
        if self.rig.agent_answers:
            for _ in range(3):
                self.rig.heartbeat(after_s=301.0)
            assert self.rig.target.index_state is IndexState.LIVE
            assert self._matched() == self.held

    @invariant()
    def a_live_index_that_lacks_no_number_is_the_truth(self):
        target = self.rig.target
        if target.index_state is IndexState.LIVE and target.next_event_seq == len(self.rig.published):
            assert self.rig.is_true() and self._matched() == self.held

    def _matched(self):
        residency, keyer = self.rig.keeper.residency, self.rig.router.keyer
        prompts = {n: keyer.prompt_keys(text(n, blocks=2), SIZE) for n in range(6)}
        return {n for n, keys in prompts.items() if residency.depths(keys)[0] == 2}


TestLossyEvents = LossyEvents.TestCase
TestLossyEvents.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
