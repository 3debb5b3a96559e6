"""Order in one event stream, as a table of what arrives and what counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.index.sequence import Apply, AskReplay, AskSnapshot, Empty, Ignored, Phase, Restart, Sequence
from kvrelay.core.model.events import BlocksCleared, KvBatch
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.units import IndexState

WORKER = WorkerId("w", "1")


def batch(seq, *events):
    return KvBatch(WORKER, 0, seq, events)


def short(verdicts):
    """Readable form: 3 applied, "?3" asked for, "?*" the agent asked, "!3" emptied, "*3" restarted, "=3" ignored."""
    forms = {
        Apply: lambda v: v.batch.seq,
        AskReplay: lambda v: f"?{v.from_seq}",
        AskSnapshot: lambda v: "?*",
        Empty: lambda v: f"!{v.lost_from_seq}",
        Restart: lambda v: f"*{v.last_seq}",
        Ignored: lambda v: f"={v.seq}",
    }
    return [forms[type(v)](v) for v in verdicts]


@pytest.fixture
def stream():
    sequence = Sequence(max_pending_batches=4)
    assert short(sequence.begin()) == ["?0"]
    return sequence


def test_a_fresh_worker_is_live_once_it_answers_that_it_published_nothing(stream):
    assert stream.state is IndexState.INCOMPLETE
    assert stream.replayed(()) == ()
    assert stream.state is IndexState.LIVE
    assert short(stream.offer(batch(0))) == [0]


def test_a_late_router_rebuilds_from_the_replay_and_what_came_meanwhile(stream):
    assert stream.offer(batch(2)) == ()
    assert short(stream.replayed((batch(0), batch(1), batch(2)))) == [0, 1, 2]
    assert stream.state is IndexState.LIVE and short(stream.offer(batch(3))) == [3]


def test_a_replay_that_begins_too_late_leaves_the_index_incomplete(stream):
    assert short(stream.replayed((batch(5), batch(6)))) == ["!0", 5, 6]
    assert stream.state is IndexState.INCOMPLETE
    assert short(stream.offer(batch(7, BlocksCleared()))) == [7]
    assert stream.state is IndexState.LIVE, "after a full clear, empty is the truth"


def test_without_a_replay_endpoint_a_stream_joined_at_its_start_is_whole(stream):
    assert stream.unavailable(Phase.REPLAYING) == ()
    assert short(stream.offer(batch(0))) == [0] and stream.state is IndexState.LIVE


@pytest.mark.covers("DR-06")
def test_a_gap_is_seen_at_the_next_number_filled_by_replay_and_applied_in_order(stream):
    stream.replayed(())
    assert short(stream.offer(batch(0))) == [0]
    assert short(stream.offer(batch(2))) == ["?1"]
    assert stream.offer(batch(3)) == ()
    assert short(stream.replayed((batch(1), batch(2)))) == [1, 2, 3]
    assert stream.state is IndexState.LIVE


@pytest.mark.covers("DR-06", "DR-08")
def test_a_gap_that_cannot_be_filled_empties_the_holder(stream):
    stream.replayed(())
    stream.offer(batch(0))
    assert short(stream.offer(batch(2))) == ["?1"]
    assert short(stream.unavailable(Phase.REPLAYING)) == ["!1", 2]
    assert stream.state is IndexState.INCOMPLETE


@pytest.mark.covers("S10")
def test_a_batch_that_was_applied_is_ignored_the_second_time(stream):
    stream.replayed((batch(0), batch(1)))
    assert short(stream.offer(batch(1))) == ["=1"]


def test_waiting_for_a_replay_is_bounded(stream):
    for seq in (1, 2, 3, 4):
        assert stream.offer(batch(seq)) == ()
    assert short(stream.offer(batch(5))) == ["!0", 1, 2, 3, 4, 5]


def test_an_answer_that_nobody_waits_for_changes_nothing(stream):
    stream.unavailable(Phase.REPLAYING)
    assert stream.replayed((batch(0),)) == () and stream.unavailable(Phase.REPLAYING) == ()


@pytest.fixture
def watched():
    """A stream beside whose worker an agent keeps the state."""
    sequence = Sequence(max_pending_batches=4, has_agent=True)
    assert short(sequence.begin()) == ["?*"]
    return sequence


def snapshot(sequence, last_seq, *, whole=True):
    return short(sequence.snapshot(last_seq, (batch(last_seq),), whole=whole))


@pytest.mark.covers("S17", "DR-05")
def test_a_late_router_begins_with_the_agents_snapshot_and_goes_on_with_what_came_meanwhile(watched):
    assert watched.offer(batch(40)) == () and watched.offer(batch(42)) == ()
    assert snapshot(watched, 41) == ["*41", 41, 42]
    assert watched.state is IndexState.LIVE and watched.next_seq == 43


def test_an_agent_that_does_not_answer_leaves_the_replay(watched):
    assert short(watched.unavailable(Phase.SNAPSHOTTING)) == ["?0"]
    assert short(watched.replayed((batch(0), batch(1)))) == [0, 1] and watched.state is IndexState.LIVE


def test_a_replay_fills_a_small_gap_and_the_agent_is_not_asked(watched):
    snapshot(watched, 5)
    assert short(watched.offer(batch(8))) == ["?6"]
    assert short(watched.replayed((batch(6), batch(7), batch(8)))) == [6, 7, 8]
    assert not watched.waiting and watched.state is IndexState.LIVE


@pytest.mark.parametrize("replay", ["none", "too short"])
def test_a_gap_beyond_the_replay_is_mended_by_the_agent(watched, replay):
    snapshot(watched, 5)
    assert short(watched.offer(batch(9))) == ["?6"]
    left = watched.unavailable(Phase.REPLAYING) if replay == "none" else watched.replayed((batch(8), batch(9)))
    assert short(left) == ["?*"]
    assert watched.offer(batch(10)) == ()
    assert snapshot(watched, 9) == ["*9", 9, 10]
    assert watched.state is IndexState.LIVE


@pytest.mark.covers("DR-08")
def test_each_is_asked_once_about_a_gap_and_then_it_is_given_up(watched):
    snapshot(watched, 5)
    watched.offer(batch(9))
    assert short(watched.unavailable(Phase.REPLAYING)) == ["?*"]
    assert short(watched.unavailable(Phase.SNAPSHOTTING)) == ["!6", 9]
    assert watched.state is IndexState.INCOMPLETE and not watched.waiting


def test_a_snapshot_older_than_what_was_applied_is_no_answer(watched):
    snapshot(watched, 5)
    watched.offer(batch(7))
    watched.unavailable(Phase.REPLAYING)
    assert snapshot(watched, 4) == ["!6", 7]


def test_a_snapshot_that_stops_in_front_of_the_same_gap_does_not_fill_it(watched):
    snapshot(watched, 5)
    watched.offer(batch(7))
    watched.unavailable(Phase.REPLAYING)
    assert snapshot(watched, 5) == ["*5", 5, "!6", 7]


@pytest.mark.covers("DR-07")
def test_a_lost_tail_is_replayed_when_the_agent_names_it(watched):
    snapshot(watched, 5)
    assert watched.behind(5) == ()
    assert short(watched.behind(7)) == ["?6"]
    assert short(watched.replayed((batch(6), batch(7)))) == [6, 7] and watched.state is IndexState.LIVE


@pytest.mark.covers("DR-07")
def test_a_lost_tail_without_replay_is_in_the_snapshot_or_given_up(watched):
    snapshot(watched, 5)
    watched.behind(7)
    assert short(watched.replayed((batch(6),))) == ["?*"], "a part of the tail is not the tail"
    assert snapshot(watched, 8) == ["*8", 8]
    watched.behind(9)
    watched.unavailable(Phase.REPLAYING)
    assert short(watched.unavailable(Phase.SNAPSHOTTING)) == ["!9"]
    assert short(watched.offer(batch(10))) == [10] and watched.state is IndexState.INCOMPLETE


def test_an_agent_that_missed_something_itself_leaves_the_index_incomplete(watched):
    assert snapshot(watched, 3, whole=False) == ["*3", 3, "?4"]
    assert watched.replayed(()) == () and watched.state is IndexState.INCOMPLETE
    assert short(watched.restore()) == ["?*"]
    assert snapshot(watched, 3) == ["*3", 3] and watched.state is IndexState.LIVE


@given(st.permutations(range(8)), st.data())
def test_whatever_the_order_nothing_is_applied_twice_or_out_of_order(order, data):
    sequence = Sequence(max_pending_batches=100)
    verdicts = [*sequence.begin()]
    for seq in order:
        verdicts += sequence.offer(batch(seq))
        if sequence.waiting and data.draw(st.booleans()):
            start = data.draw(st.integers(sequence.next_seq, 7))
            verdicts += sequence.replayed(tuple(batch(s) for s in range(start, seq + 1)))
    verdicts += sequence.unavailable(Phase.REPLAYING)
    applied = [v.batch.seq for v in verdicts if isinstance(v, Apply)]
    assert applied == sorted(set(applied))
    emptied = any(isinstance(v, Empty) for v in verdicts)
    assert emptied or applied == list(range(8)), "a missing batch is never passed over in silence"
    assert all(isinstance(v, Apply | AskReplay | Empty | Ignored) for v in verdicts)
