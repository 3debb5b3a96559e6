"""The endless cache, on small traces by hand and on public ones against figures that another program computed."""

from __future__ import annotations

import pytest
from tests.core.traces.public_traces import needs_public_traces, public_trace, reference

from kvrelay.core.traces.derived_sessions import derived_sessions, with_derived_sessions
from kvrelay.core.traces.reuse import endless_cache, reuse_of
from kvrelay.core.traces.trace import GLOBAL_SCOPE, SESSION_SCOPE, Session, Trace, Turn, arrivals


def turn(due_ms: float, *ids: int, tokens: int) -> Turn:
    return Turn(due_ms, 0.0, ids, tokens, 5)


def test_hits_are_prefixes_seen_before_and_know_from_whom() -> None:
    trace = Trace(
        10,
        SESSION_SCOPE,
        (
            Session("a", "a", (turn(0, 1, 2, tokens=20), turn(50, 1, 2, 3, tokens=35))),
            Session("a/sub", "a", (turn(0, 1, 9, tokens=20), turn(9, 1, 9, 3, tokens=30)), 20, parent_id="a"),
            Session("b", "b", (turn(0, 1, 2, tokens=20),), 60),
        ),
    )

    found = endless_cache(trace)

    assert [(r.session_id, r.hit_blocks, r.own_hit_blocks, r.family_hit_blocks) for r in found] == [
        ("a", 0, 0, 0),
        ("a/sub", 1, 0, 1),
        ("a/sub", 2, 2, 0),
        ("a", 3, 2, 1),  # block 3 came from the sub-agent
        ("b", 0, 0, 0),  # another scope: the same numbers are other contents
    ]
    assert reuse_of(trace).hit_tokens == 10 + 20 + 30


def test_the_tail_rule_decides_whether_a_partial_block_counts() -> None:
    trace = Trace(
        10,
        GLOBAL_SCOPE,
        (Session("a", "", (turn(0, 1, 2, 3, tokens=25),)), Session("b", "", (turn(1, 1, 2, 3, tokens=25),))),
    )

    listed, full = reuse_of(trace, tail_rule="listed"), reuse_of(trace, tail_rule="full")

    assert (listed.blocks, listed.hit_blocks, listed.hit_tokens, listed.token_hit) == (6, 3, 25, 0.5)
    assert (full.blocks, full.hit_blocks, full.hit_tokens, full.token_hit) == (4, 2, 20, 0.4)
    assert full.other_hit_blocks == 2


def test_sessions_are_derived_from_the_last_full_block() -> None:
    rows = [
        (0, (0, 1, 2), 30),  # claims 2
        (1, (0, 5), 20),  # claims 5
        (2, (0, 1, 2, 3), 40),  # continues the first, claims 3
        (3, (0, 1, 2, 4), 40),  # 2 is taken already: a session of its own
        (4, (0,), 10),  # only the block that all share
    ]
    trace = Trace(
        10, GLOBAL_SCOPE, tuple(Session(f"row-{n}", "", (turn(0, *ids, tokens=tokens),), n) for n, ids, tokens in rows)
    )

    assert derived_sessions(trace) == [0, 1, 0, 2, 3]
    grouped = with_derived_sessions(trace)
    assert [(s.session_id, s.start_ms, [t.due_ms for t in s.turns]) for s in grouped.sessions] == [
        ("derived-0", 0, [0, 2]),
        ("derived-1", 1, [0]),
        ("derived-2", 3, [0]),
        ("derived-3", 4, [0]),
    ]
    assert sorted(a.turn.block_ids for a in arrivals(grouped)) == sorted(ids for _, ids, _ in rows)


@needs_public_traces
@pytest.mark.covers("BM-12")
@pytest.mark.parametrize(
    "file",
    [
        "mooncake_conversation_first1000.jsonl",
        "mooncake_conversation_full.jsonl.gz",
        "mooncake_synthetic_first1000.jsonl",
        "mooncake_synthetic_full.jsonl.gz",
        "mooncake_arxiv_toolmix_93.jsonl",
        "weka_first40_sessions.jsonl.gz",
        "weka_small10_sessions.jsonl.gz",
    ],
)
def test_the_endless_cache_on_public_traces_is_the_published_reference(file: str) -> None:
    wanted = reference(file, workers=1, eviction="none")

    found = reuse_of(public_trace(file))

    assert {
        "requests": found.requests,
        "blocks": found.blocks,
        "hit_blocks": found.hit_blocks,
        "block_hit": found.block_hit,
        "tokens": found.tokens,
        "hit_tokens": found.hit_tokens,
        "token_hit": found.token_hit,
        "miss_never_seen_blocks": found.missed_blocks,
        "token_hit_second_half": found.token_hit_second_half,
    }.items() <= wanted.items()


@needs_public_traces
def test_flattened_rows_are_the_same_trace_as_the_sessions_that_they_were_made_of() -> None:
    flat, sessions = (
        reuse_of(public_trace(f"weka_small10_{kind}.jsonl.gz")) for kind in ("as_mooncake_blk64", "sessions")
    )

    assert (flat.blocks, flat.hit_blocks, flat.hit_tokens) == (
        sessions.blocks,
        sessions.hit_blocks,
        sessions.hit_tokens,
    )


@needs_public_traces
@pytest.mark.parametrize(
    ("file", "sessions"),
    [
        ("mooncake_conversation_full.jsonl.gz", 8099),
        ("mooncake_synthetic_full.jsonl.gz", 2660),
        ("mooncake_conversation_first1000.jsonl", 814),
        ("mooncake_synthetic_first1000.jsonl", 951),
        ("mooncake_arxiv_toolmix_93.jsonl", 69),
    ],
)
def test_derived_sessions_of_public_traces(file: str, sessions: int) -> None:
    assert len(set(derived_sessions(public_trace(file)))) == sessions
