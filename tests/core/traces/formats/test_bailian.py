from __future__ import annotations

import json

import pytest

from kvrelay.core.traces.formats import bailian
from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.trace import NotTold


def row(chat: object, parent: object, at: float, ids: list[object]) -> bytes:
    members = {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": len(ids) * 16 + 3}
    return json.dumps({**members, "output_length": 9, "type": "text", "turn": 1, "hash_ids": ids}).encode()


TOLD = ImportOptions(block_size_tokens=16, time_unit="s")


@pytest.mark.parametrize("spell", [int, str])
def test_chats_with_parents_are_turns_of_a_session(spell: type) -> None:
    trace = bailian.read(
        [
            row(spell(10), -1, 61.114, [spell(1), spell(2)]),
            row(spell(11), -1, 61.2, [spell(1)]),
            row(spell(12), spell(10), 70.0, [spell(1), spell(2), spell(3)]),
            row(spell(13), spell(12), 71.0, [spell(1), spell(2), spell(3), spell(4)]),
            row(spell(14), spell(10), 72.0, [spell(1), spell(2), spell(5)]),
            row(spell(15), spell(99), 73.0, [spell(6)]),
        ],
        ImportOptions(block_size_tokens=16),
    )

    assert [(s.session_id, s.start_ms, [t.due_ms for t in s.turns]) for s in trace.sessions] == [
        ("chat-10", 0, [0, 8886.0, 9886.0]),
        ("chat-11", 86.0, [0]),
        ("chat-14", 10886.0, [0]),
        ("chat-15", 11886.0, [0]),
    ]
    shared = {turn.block_ids[:1] for session in trace.sessions[:3] for turn in session.turns}
    assert len(shared) == 1
    assert trace.notices[:3] == (
        "Timestamps are taken as seconds: 2 of 6 have a fraction.",
        "1 chats continue a chat that is not in the file before them: they begin a session.",
        "1 chats continue a chat that was continued already: they are sessions of their own.",
    )


def test_whole_timestamps_may_be_either_and_are_asked_for() -> None:
    rows = [row(1, -1, 5, [1, 2]), row(2, 1, 7, [1, 2, 3])]

    with pytest.raises(NotTold, match="seconds or milliseconds") as problem:
        bailian.read(rows, ImportOptions(block_size_tokens=16))

    assert problem.value.option == "time_unit"
    assert bailian.read(rows, TOLD).sessions[0].turns[1].due_ms == 2000
    assert bailian.read(rows, ImportOptions(16, time_unit="ms")).sessions[0].turns[1].due_ms == 2
