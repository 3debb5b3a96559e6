from __future__ import annotations

import msgspec
import pytest

from kvrelay.lab.arms.counters import Counted, added, reading_of
from kvrelay.lab.arms.isolation import Isolation, IsolationState, Start, isolation_of
from kvrelay.lab.arms.settings import Reset
from kvrelay.lab.replay.sample import Sample

START = Start(Reset.CACHE_SALT, 0)


def sample(name: str, sent_ms: float, cached: int | None, prompt: int = 1000) -> Sample:
    return Sample(
        arm="a-0", policy="a", repeat=0, request_id=name, session_id=name, turn=0, due_ms=sent_ms, sent_ms=sent_ms,
        ended_ms=sent_ms + 50, prompt_tokens=prompt, cached_tokens=cached,
    )  # fmt: skip


def judged(
    first_hit: int | None = 0, second_hit: int | None = 800, claimed: int | None = 0, start: Start = START
) -> Isolation:
    samples = [sample("second", 20.0, second_hit), sample("first", 10.0, first_hit)]
    counted = {"w": Counted(2000, (first_hit or 0) + (second_hit or 0), 0, 0, 0.5)}
    return isolation_of(start, samples, {"first": claimed, "second": 800}, {"first": 0, "second": 800}, counted)


@pytest.mark.covers("S46", "BM-20")
def test_an_arm_that_hit_only_what_it_sent_itself_is_clean() -> None:
    found = judged()

    assert (found.state, found.first_request_hit_tokens, found.impossible_hit_tokens) == (IsolationState.CLEAN, 0, 0)
    assert found.engine_hit_ratio == 0.4


@pytest.mark.covers("S46", "BM-20")
@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (judged(first_hit=640), "the first request hit 640 tokens that the arm had not sent"),
        (judged(claimed=320), "the first request was promised 320 tokens that the arm had not sent"),
        (judged(second_hit=960), "requests hit 160 tokens more than the arm had sent before them"),
        (
            judged(start=Start(Reset.PREFIX_CACHE, 7)),
            "the index knew 7 blocks before the first request",
        ),
    ],
)
def test_anything_from_before_the_arm_contaminates_it(found: Isolation, reason: str) -> None:
    assert found.state is IsolationState.CONTAMINATED
    assert found.reason.startswith(f"{reason}; the workers' own counters say ")
    assert found.reason.endswith("% hits over the arm")


def test_a_salted_arm_may_find_blocks_that_it_cannot_hit() -> None:
    assert judged(start=Start(Reset.CACHE_SALT, 7)).state is IsolationState.CLEAN


def test_engines_that_say_nothing_leave_it_unverified() -> None:
    assert judged(first_hit=None, second_hit=None).state is IsolationState.UNVERIFIED


PAGE = """vllm:prefix_cache_queries_total{engine="0"} 1000.0
vllm:prefix_cache_hits_total{engine="0"} 250.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_preemptions_total{engine="0"} 2.0
"""


@pytest.mark.covers("BM-10")
def test_counters_are_read_from_the_engines_own_page_and_only_their_growth_counts() -> None:
    before = reading_of("vllm", PAGE)
    after = msgspec.structs.replace(before, queries_tokens=3000, hits_tokens=1250, preemptions=2)

    assert (before.queries_tokens, before.hits_tokens, before.preemptions) == (1000, 250, 2)
    assert before.kv_usage_ratio == 0.75
    assert added(before, after, 0.9) == Counted(2000, 1000, 0, None, 0.9)
    assert added(reading_of("vllm", ""), after, None) == Counted(None, None, None, None, None)
