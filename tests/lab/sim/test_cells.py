"""Cells of a sweep: three kinds of questions, one answer each, the same wherever it was computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.lab.sim.small_trace import write_small_trace

from kvrelay.core.cachesim.misses import Miss
from kvrelay.lab.sim.cells import (
    CACHES,
    Answer,
    CapacityCell,
    Cell,
    EventFaults,
    Restart,
    RoutingCell,
    Source,
    answer_cell,
)
from kvrelay.lab.sim.sweep import digest, run_cells


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    return Source(str(write_small_trace(tmp_path_factory.mktemp("trace") / "small.jsonl")))


def every_kind(source: Source) -> list[Cell]:
    late = EventFaults(delay_ms=500.0, spread_ms=2_000.0, loss=0.1, duplication=0.1)
    return [
        *(CapacityCell(source, cache, 40, workers=2, router="best_prefix", ttl_s=20.0) for cache in CACHES),
        CapacityCell(source, "lru", 20, lower_blocks=(20, 40), restarts=(Restart(30.0, 0),)),
        RoutingCell(source, "cache_load", 60, 2),
        RoutingCell(source, "sticky", 60, 2, events=late, restarts=(Restart(30.0, 1),)),
    ]


@pytest.mark.covers("SM-02", "SM-03", "SM-06", "TU-03")
def test_hits_and_classes_of_misses_add_up_in_every_kind_of_cell(source):
    answers = run_cells(every_kind(source), jobs=1)
    for answer in answers:
        assert answer.hit_tokens + sum(answer.missed_tokens.values()) == answer.input_tokens
        assert answer.requests == 40
    by_cache = {answer.cell.cache: answer for answer in answers[: len(CACHES)]}
    assert by_cache["ttl"].expired_blocks > 0
    assert all(by_cache[name].expired_blocks == 0 for name in CACHES if name != "ttl")
    assert by_cache["belady"].hit_tokens == max(answer.hit_tokens for answer in by_cache.values())
    tiered, clever, disturbed = answers[len(CACHES) :]
    assert sum(tiered.hit_tokens_by_tier.values()) == tiered.hit_tokens and len(tiered.hit_tokens_by_tier) > 1
    assert tiered.missed_tokens[Miss.INVALIDATED] > 0
    assert clever.claimed_tokens >= clever.hit_tokens > 0
    assert disturbed.missed_tokens[Miss.INVALIDATED] > 0 and disturbed.reports["event_gap"] > 0


@pytest.mark.covers("SM-05")
def test_no_answer_speaks_of_speed():
    names = {*Answer.__struct_fields__, *CapacityCell.__struct_fields__}
    forbidden = ("latency", "throughput", "ttft", "itl", "per_s", "_ms", "seconds", "duration", "slo")
    assert not [name for name in names for word in forbidden if word in name]


@pytest.mark.covers("TU-02")
def test_tiers_of_lru_are_one_lru_of_their_sum(source):
    one = answer_cell(CapacityCell(source, "lru", 60))
    three = answer_cell(CapacityCell(source, "lru", 10, lower_blocks=(20, 30)))
    assert (one.hit_tokens, one.missed_tokens) == (three.hit_tokens, three.missed_tokens)


def test_a_sweep_on_processes_answers_what_one_process_does(source):
    cells = every_kind(source)[-2:]
    assert digest(run_cells(cells, jobs=2)) == digest(run_cells(cells, jobs=1))


def test_the_digest_is_the_same_for_any_hash_seed(source):
    code = (
        "import sys, msgspec\n"
        "from kvrelay.lab.sim.cells import Cell\n"
        "from kvrelay.lab.sim.sweep import digest, run_cells\n"
        "print(digest(run_cells(msgspec.json.decode(sys.stdin.buffer.read(), type=list[Cell]), jobs=1)))\n"
    )
    cells = msgspec.json.encode(every_kind(source))
    path = os.pathsep.join([str(Path(__file__).parents[3] / "src"), os.environ.get("PYTHONPATH", "")])
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=cells,
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": path},
        ).stdout
        for seed in range(4)
    }
    assert len(found) == 1
