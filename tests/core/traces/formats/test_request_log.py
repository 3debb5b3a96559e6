from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.core.traces.formats import native, request_log
from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.reuse import reuse_of
from kvrelay.core.traces.trace import NotTold, TraceError

SECRET = "the patient in room 12 has "
TOLD = ImportOptions(block_size_tokens=8, key=b"one key")


def chat(at: float, *said: str, **more: Any) -> bytes:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": SECRET * 4 + text} for role, text in zip(roles, said, strict=False)]
    usage = {"usage": {"prompt_tokens": 77, "completion_tokens": 5}}
    return json.dumps(
        {"timestamp": at, "body": {"model": "m", "messages": messages}, "response": usage, **more}
    ).encode()


LOG = [
    chat(1_700_000_000, "be kind", "a question", session_id="alice@example.org"),
    chat(1_700_000_002.5, "be kind", "a question", "an answer", "another", session_id="alice@example.org"),
    chat(1_700_000_003, "be kind", "something else"),
]


def test_equal_beginnings_are_equal_blocks_and_nothing_else_is_left() -> None:
    trace = request_log.read(LOG, TOLD)

    alice, other = trace.sessions
    first, second = alice.turns
    assert second.block_ids[: len(first.block_ids) - 1] == first.block_ids[:-1]
    assert other.turns[0].block_ids[:5] == first.block_ids[:5]
    assert (second.due_ms, other.start_ms, first.output_tokens) == (2500.0, 3000.0, 5)
    assert reuse_of(trace).own_hit_blocks > 0 and reuse_of(trace).other_hit_blocks > 0
    kept = b"\n".join(native.write(trace).lines)
    for word in (b"patient", b"room", b"alice", b"kind", b"assistant"):
        assert word not in kept
    assert trace.notices[0] == "Prompts are hashed with a key; no text is kept."


def test_names_of_sessions_depend_on_the_key_only() -> None:
    names = [request_log.read(LOG, ImportOptions(8, key=key)).sessions[0].session_id for key in (b"1", b"1", b"2")]

    assert names[0] == names[1] != names[2]


def test_a_tokenizer_gives_exact_lengths_and_token_ids_are_taken_as_they_are() -> None:
    rows = [
        json.dumps({"created": 1, "prompt": "abcdefgh", "max_tokens": 3}).encode(),
        json.dumps({"created": 2, "prompt": list(b"abcdxyz"), "max_tokens": 3}).encode(),
    ]

    trace = request_log.read(rows, ImportOptions(4, tokenize=lambda text: list(text.encode())))

    assert [(s.turns[0].input_tokens, s.turns[0].block_ids) for s in trace.sessions] == [(8, (0, 1)), (7, (0,))]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ({"timestamp": 1, "body": {"max_tokens": 1}}, "neither `messages` nor"),
        ({"timestamp": 1, "prompt": SECRET}, "no `usage` and no `max_tokens`"),
        ({"prompt": SECRET, "max_tokens": 1}, "no time of the request"),
        ({"timestamp": SECRET, "prompt": SECRET, "max_tokens": 1}, "no time of the request"),
    ],
)
def test_what_is_missing_is_named_without_quoting_anything(line: dict[str, Any], found: str) -> None:
    with pytest.raises(TraceError, match=found) as problem:
        request_log.read([json.dumps(line).encode()], TOLD)

    assert SECRET not in str(problem.value)


def test_a_log_has_no_block_size_of_its_own() -> None:
    with pytest.raises(NotTold) as problem:
        request_log.read(LOG)

    assert problem.value.option == "block_size"
