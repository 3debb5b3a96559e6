"""The language of event faults: what each instruction means, and what is said about a wrong one."""

from __future__ import annotations

import pytest

from kvrelay.edge.chaos.script import (
    MAX_SEQ,
    Clear,
    Delay,
    Drop,
    DropTail,
    Duplicate,
    Hold,
    Release,
    Reorder,
    ReplayCut,
    ReplayDelay,
    ReplayDrop,
    ReplayLast,
    ReplayOff,
    ReplayOn,
    Seqs,
    parse_script,
)
from kvrelay.edge.chaos.words import ScriptError


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("drop 17", Drop(Seqs(17, 17))),
        ("drop 20-25", Drop(Seqs(20, 25))),
        ("drop 40-", Drop(Seqs(40, MAX_SEQ))),
        ("drop all", Drop(Seqs())),
        ("drop tail", DropTail()),
        ("delay 30 2s", Delay(Seqs(30, 30), 2.0)),
        ("delay 1-3 250ms", Delay(Seqs(1, 3), 0.25)),
        ("duplicate 7", Duplicate(Seqs(7, 7), 2)),
        ("duplicate 7 3", Duplicate(Seqs(7, 7), 3)),
        ("reorder 10 12", Reorder(10, 12)),
        ("hold 40 until release", Hold(Seqs(40, 40), None)),
        ("hold 40- until 45", Hold(Seqs(40, MAX_SEQ), 45)),
        ("release", Release()),
        ("clear", Clear()),
        ("replay off", ReplayOff()),
        ("replay on", ReplayOn()),
        ("replay drop 17", ReplayDrop(Seqs(17, 17))),
        ("replay last 5", ReplayLast(5)),
        ("replay delay 1.5s", ReplayDelay(1.5)),
        ("replay cut 3", ReplayCut(3)),
    ],
)
def test_every_instruction(text, instruction):
    assert parse_script(text) == (instruction,)


def test_lines_semicolons_and_comments():
    assert parse_script("# the gap\ndrop 1; drop 2  # and this\n\n release") == (
        Drop(Seqs(1, 1)),
        Drop(Seqs(2, 2)),
        Release(),
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "drpo 17",
            "line 1, `drpo 17`: unknown instruction `drpo`; known: drop, delay, duplicate, reorder, hold, release,"
            " clear, replay; did you mean `drop`?",
        ),
        ("drop 1\ndrop", "line 2, `drop`: legal: drop SEQS | drop tail"),
        ("drop x", "line 1, `drop x`: `x` names no batches; legal: 17, 20-25, 40-, all"),
        ("drop 9-3", "line 1, `drop 9-3`: `9-3` names no batches: 3 is smaller than 9, or too large"),
        ("delay 3 2", "line 1, `delay 3 2`: `2` is no duration; legal: 500ms, 2s, 1.5s, 1m"),
        ("delay 3 61m", "line 1, `delay 3 61m`: `61m` is longer than an hour"),
        (
            "duplicate 3 1",
            "line 1, `duplicate 3 1`: `1` is not legal here; legal: a whole number from 2 to 100",
        ),
        ("reorder 5 5", "line 1, `reorder 5 5`: 5 does not come after 5; legal: reorder SEQ LATER_SEQ"),
        (
            "hold 9 until 4",
            "line 1, `hold 9 until 4`: 4 comes before 9; legal: hold SEQS until release | hold SEQS until SEQ",
        ),
        (
            "replay 5",
            "line 1, `replay 5`: legal: replay on | off | drop SEQS | last N | delay DURATION | cut N",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(text, complaint):
    with pytest.raises(ScriptError) as error:
        parse_script(text)
    assert str(error.value) == complaint
