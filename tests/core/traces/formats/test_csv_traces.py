"""Azure and BurstGPT: tables of times and lengths."""

from __future__ import annotations

import pytest

from kvrelay.core.traces.formats import azure, burstgpt
from kvrelay.core.traces.trace import NO_BLOCKS, NO_SCOPE, TraceError

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_2 = b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def test_azure_dates_are_counted_from_the_first_request() -> None:
    trace = azure.read([AZURE, b"2023-11-16 23:59:59.5000000,374,44", b"2023-11-17 00:00:00.2509000,396,109"])

    assert (trace.block_size_tokens, trace.hash_scope) == (NO_BLOCKS, NO_SCOPE)
    assert [(s.start_ms, s.turns[0].input_tokens, s.turns[0].output_tokens) for s in trace.sessions] == [
        (0.0, 374, 44),
        (750.9, 396, 109),
    ]
    assert "What its prompts shared is not known." in trace.limitations()[0]


def test_later_azure_files_have_a_time_zone() -> None:
    trace = azure.read([AZURE, b"2024-05-10 00:00:00.009930+00:00,2162,5", b"2024-05-10 02:00:00.109930+02:00,9,1"])

    assert [session.start_ms for session in trace.sessions] == [0.0, 100.0]


def test_burstgpt_rows_with_and_without_sessions() -> None:
    plain = burstgpt.read([BURST, b"5,ChatGPT,472,18,490,Conversation log", b"45,GPT-4,1087,0,1087,API log"])
    later = burstgpt.read([BURST_2, b"5,7,1.2,ChatGPT,10,2,12,x", b"6,8,1.0,ChatGPT,10,2,12,x", b"9,7,1,GPT,30,2,32,x"])

    assert [session.start_ms for session in plain.sessions] == [0.0, 40_000.0]
    assert plain.notices[0] == "1 rows have no response tokens (requests that failed then): they are kept."
    assert [(s.session_id, [t.due_ms for t in s.turns]) for s in later.sessions] == [("7", [0.0, 4000.0]), ("8", [0.0])]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([b"TIMESTAMP,Tokens"], "no column `ContextTokens`"),
        ([AZURE], "an empty file"),
        ([AZURE, b"yesterday,1,2"], "`TIMESTAMP` is `yesterday`"),
        ([AZURE, b"2023-11-16 18:15:46,x,2"], "`ContextTokens` is `x`"),
        ([AZURE, b"2023-11-16 18:15:46,1"], "fewer columns"),
        ([AZURE, b"2023-13-16 18:15:46,1,1"], "`TIMESTAMP` is `2023-13-16 18:15:46`"),
    ],
)
def test_bad_rows_are_named(rows: list[bytes], found: str) -> None:
    with pytest.raises(TraceError, match=found):
        azure.read(rows)
