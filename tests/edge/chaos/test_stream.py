"""What a script does to a stream, number by number and without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.edge.chaos.script import parse_script
from kvrelay.edge.chaos.stream import Action, Batch, Done, FaultyStream


def batch(seq, topic=b"a"):
    return Batch(topic, seq, (topic, seq.to_bytes(8, "big"), b"x"))


class Stream:
    def __init__(self, script=""):
        self.faults = FaultyStream()
        self.now = 0.0
        self.actions = []
        self.do(script)

    def do(self, script):
        done = Done()
        for instruction in parse_script(script):
            done += self.faults.instruct(instruction)
        return self._seqs(done)

    def send(self, *seqs, topic=b"a"):
        """What comes out for each that goes in."""
        return [self._seqs(self.faults.arrived(self.now, batch(seq, topic))) for seq in seqs]

    def wait(self, seconds):
        self.now += seconds
        return self._seqs(self.faults.due(self.now))

    def _seqs(self, done):
        self.actions += done.actions
        return [sent.seq for sent in done.send]


@pytest.mark.parametrize(
    ("script", "out"),
    [
        ("", [[0], [1], [2], [3], [4]]),
        ("drop 1", [[0], [], [2], [3], [4]]),
        ("drop 1-3", [[0], [], [], [], [4]]),
        ("duplicate 2 3", [[0], [1], [2, 2, 2], [3], [4]]),
        ("reorder 1 3", [[0], [], [2], [3, 1], [4]]),
        ("hold 1 until 3", [[0], [], [2], [3, 1], [4]]),
        ("hold 1-2 until 4", [[0], [], [], [3], [4, 1, 2]]),
        ("hold 2- until release", [[0], [1], [], [], []]),
        ("drop tail", [[], [0], [1], [2], [3]]),
        ("drop 2; duplicate 2", [[0], [1], [], [3], [4]]),
        ("drop 4; drop tail", [[], [0], [1], [2], []]),
        ("duplicate 1; drop tail", [[], [0], [1, 1], [2], [3]]),
    ],
)
def test_five_batches(script, out):
    assert Stream(script).send(0, 1, 2, 3, 4) == out


def test_a_delay_ends_in_its_own_time_and_others_overtake_it():
    stream = Stream("delay 1 2s")
    assert stream.send(0, 1, 2) == [[0], [], [2]]
    assert stream.faults.next_due() == 2.0 and stream.wait(1.9) == []
    assert stream.wait(0.2) == [1] and stream.faults.next_due() is None


def test_release_lets_go_in_order_and_the_instruction_stays():
    stream = Stream("hold 3- until release; delay 1 1m")
    stream.send(0, 1, 2, 3, 4)
    assert stream.faults.withheld() == 3
    assert stream.do("release") == [1, 3, 4]
    assert stream.send(5) == [[]] and stream.faults.withheld() == 1


def test_clear_forgets_and_releases_the_tail_too():
    stream = Stream("drop tail; drop 7")
    stream.send(0, 1)
    assert stream.do("release") == [], "the tail stays lost while it is the tail"
    assert stream.do("clear") == [1]
    assert stream.send(7) == [[7]]


def test_each_topic_has_numbers_of_its_own():
    stream = Stream("reorder 1 2; drop tail")
    assert stream.send(0, 1) == [[], []]
    assert stream.send(2, topic=b"b") == [[]]
    assert stream.send(2) == [[0, 2]], "b's 2 has released nothing of a; the released 1 is a's newest now"


def test_what_was_done_is_written_down():
    stream = Stream("drop 1; delay 2 1s")
    stream.send(0, 1, 2)
    stream.wait(1)
    assert stream.actions == [
        Action("pass", "a", 0, 1),
        Action("drop", "a", 1),
        Action("delay", "a", 2, 0, "1 s"),
        Action("release", "a", 2, 1, "delay over"),
    ]


SCRIPTS = st.lists(
    st.sampled_from(
        ["delay 2 1s", "duplicate 3", "reorder 1 4", "hold 5- until release", "hold 0 until 2", "drop tail"]
    )
)


@given(SCRIPTS, st.lists(st.integers(0, 7), unique=True))
def test_without_a_drop_everything_comes_out_at_the_end(script, seqs):
    stream = Stream("\n".join(script))
    out = [seq for sent in stream.send(*seqs) for seq in sent]
    out += stream.wait(10) + stream.do("clear")
    assert set(out) == set(seqs) and stream.faults.withheld() == 0
    assert sorted(out) == sorted([*seqs, *(s for s in seqs if s == 3 and "duplicate 3" in script)])
