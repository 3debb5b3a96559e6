from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from kvrelay.core.traces.plan import Scale, make_plan
from kvrelay.core.traces.presets import BLOCK_TOKENS, PRESETS, preset
from kvrelay.core.traces.reuse import endless_cache, reuse_of
from kvrelay.core.traces.trace import arrivals

SMOKE_DIGEST = "fe67cec9504790d2ff55840415248a2a1dad3f51196438497abdcd93fe73f9f7"


@pytest.mark.covers("BM-08", "BM-09")
def test_prefix_repetition_has_its_parameters_and_always_the_same_prompts() -> None:
    smoke = preset("prefix_repetition")

    assert (smoke.trace.requests, smoke.max_in_flight, smoke.label) == (100, 4, "initial_fill_mixed")
    assert smoke.trace.label == "initial_fill_mixed"
    assert smoke.parameters == {
        "requests": 100,
        "seed": 42,
        "rate_per_s": 2.0,
        "max_in_flight": 4,
        "prefix_tokens": 512,
        "suffix_tokens": 128,
        "prefixes": 5,
        "output_tokens": 128,
    }
    turns = [arrival.turn for arrival in arrivals(smoke.trace)]
    assert {(turn.input_tokens, turn.output_tokens) for turn in turns} == {(512 + 128, 128)}
    heads = Counter(turn.block_ids[: 512 // BLOCK_TOKENS] for turn in turns)
    assert sorted(heads.values()) == [20] * 5
    assert len({block for turn in turns for block in turn.block_ids[32:]}) == 100 * 8
    assert reuse_of(smoke.trace).hit_tokens == 95 * 512
    assert make_plan(smoke.trace, Scale(BLOCK_TOKENS), seed=42).digest() == SMOKE_DIGEST


def test_gaps_of_prefix_repetition_are_those_of_two_requests_a_second() -> None:
    starts = [arrival.at_ms for arrival in arrivals(preset("prefix_repetition").trace)]

    gaps = [after - before for before, after in pairwise(starts)]
    assert 400 < sum(gaps) / len(gaps) < 600
    assert 0.35 < sum(gap < 500 * 0.6931 for gap in gaps) / len(gaps) < 0.65  # the median of an exponential


@pytest.mark.covers("BM-11")
def test_cold_blocks_share_nothing_and_the_others_repeat_them() -> None:
    made = preset("cold_warm_restart")

    assert [(phase.name, phase.before) for phase in made.phases] == [
        ("cold-1", "reset"),
        ("warm-1", "nothing"),
        ("restart-1", "restart"),
        ("cold-2", "reset"),
        ("warm-2", "nothing"),
        ("restart-2", "restart"),
    ]
    found = endless_cache(made.trace)
    assert [request.hit_blocks for request in found[:12]] == [0] * 12
    assert all(request.hit_blocks == request.blocks for request in found[12:])
    assert all(name.startswith("cold-1/") for name in (request.session_id for request in found[:12]))


def test_hot_prefixes_get_exactly_their_share() -> None:
    trace = preset("hot_prefix").trace

    asked = Counter(arrival.turn.block_ids[0] for arrival in arrivals(trace))
    assert sorted(asked.values(), reverse=True)[:2] == [40, 40]
    assert sum(asked.values()) == 100 and len(asked) == 10


def test_agents_share_a_head_and_every_turn_continues_the_one_before() -> None:
    trace = preset("agents").trace

    parents = [session for session in trace.sessions if session.parent_id is None]
    assert (len(parents), len(trace.sessions)) == (12, 16)
    assert len({session.turns[0].block_ids[: 2048 // BLOCK_TOKENS] for session in parents}) == 1
    for session in trace.sessions:
        for before, after in pairwise(session.turns):
            assert after.block_ids[: len(before.block_ids)] == before.block_ids
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.think_ms >= 150


def test_questions_share_instructions_and_documents() -> None:
    trace = preset("rag").trace

    turns = [arrival.turn.block_ids for arrival in arrivals(trace)]
    assert len({ids[:8] for ids in turns}) == 1
    documents = Counter(ids[8:136] for ids in turns)
    assert len(documents) == 8 and max(documents.values()) >= 20
    assert len({ids[136:] for ids in turns}) == 80


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_what_its_results_must_be_called(name: str) -> None:
    made = preset(name)

    assert made.name == name and made.label == made.trace.label and made.summary
    assert make_plan(made.trace, Scale(BLOCK_TOKENS), seed=1).digest() != SMOKE_DIGEST
    for arrival in arrivals(made.trace):
        assert len(arrival.turn.block_ids) * BLOCK_TOKENS == arrival.turn.input_tokens
