"""Order in one event stream, as a table of what arrives and what counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.index.sequence import Apply, AskReplay, Empty, Ignored, Sequence
from kvrelay.core.model.events import BlocksCleared, KvBatch
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.units import IndexState

WORKER = WorkerId("w", "1")


def batch(seq, *events):
    return KvBatch(WORKER, 0, seq, events)


def short(verdicts):
    """Readable form: 3 applied, "?3" asked for, "!3" emptied, "=3" ignored."""
    return [
        {Apply: lambda v: v.batch.seq, AskReplay: lambda v: f"?{v.from_seq}"}.get(
            type(v), lambda v: f"!{v.lost_from_seq}" if isinstance(v, Empty) else f"={v.seq}"
        )(v)
        for v in verdicts
    ]


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
    assert stream.unavailable() == ()
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
    assert short(stream.unavailable()) == ["!1", 2]
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
    stream.unavailable()
    assert stream.replayed((batch(0),)) == () and stream.unavailable() == ()


@given(st.permutations(range(8)), st.data())
def test_whatever_the_order_nothing_is_applied_twice_or_out_of_order(order, data):
    sequence = Sequence(max_pending_batches=100)
    verdicts = [*sequence.begin()]
    for seq in order:
        verdicts += sequence.offer(batch(seq))
        if sequence.replaying and data.draw(st.booleans()):
            start = data.draw(st.integers(sequence.next_seq, 7))
            verdicts += sequence.replayed(tuple(batch(s) for s in range(start, seq + 1)))
    verdicts += sequence.unavailable()
    applied = [v.batch.seq for v in verdicts if isinstance(v, Apply)]
    assert applied == sorted(set(applied))
    emptied = any(isinstance(v, Empty) for v in verdicts)
    assert emptied or applied == list(range(8)), "a missing batch is never passed over in silence"
    assert all(isinstance(v, Apply | AskReplay | Empty | Ignored) for v in verdicts)
