from __future__ import annotations

import pytest

from kvrelay.core.stats.seen_before import SeenBefore
from kvrelay.core.traces.cut import cut
from kvrelay.core.traces.plan import make_plan
from kvrelay.core.traces.trace import GLOBAL_SCOPE, SESSION_SCOPE, Session, Trace, Turn
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.demo.settings import settings_for
from kvrelay.lab.replay.trace_file import bundled_trace


def settings(trace: Trace, workers: int = 4) -> RunSettings:
    return settings_for(trace, workers=workers, repeats=3, policies=("sticky",), seed=1)


def test_bundled_trace_fits_into_the_fleet_but_not_into_one_worker() -> None:
    """Otherwise the demo would show nothing: either everybody hits everything, or nobody anything."""
    trace = bundled_trace().trace
    chosen = settings(trace)
    plan = make_plan(cut(trace, chosen.cut).trace, chosen.scale, seed=1)
    block = chosen.fleet.block_size_tokens
    seen = SeenBefore(block)
    new_blocks = sum(
        (turn.token_ids.size - seen.take(turn.token_ids)) // block for s in plan.sessions for turn in s.turns
    )

    assert 2 * chosen.fleet.blocks < new_blocks < chosen.fleet.workers * chosen.fleet.blocks
    assert chosen.cut == RunSettings().cut and chosen.scale == RunSettings().scale


@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize("block_size_tokens", [16, 64, 512])
def test_longest_request_fits_one_worker_whatever_the_traces_block_size(workers: int, block_size_tokens: int) -> None:
    ids = tuple(range(1_535))
    turns = (Turn(0, 0, ids, len(ids) * block_size_tokens, 16), Turn(9, 0, (1,), 10**9, 1))
    trace = Trace(block_size_tokens, SESSION_SCOPE, (Session("s", "s", (turns[0],) * 3 + turns[1:]),))
    chosen = settings(trace, workers)

    kept = cut(trace, chosen.cut)
    plan = make_plan(kept.trace, chosen.scale, seed=1)
    (spec,) = chosen.fleet.specs()[:1]
    assert kept.counts.over_long == 1 and plan.requests == 3
    longest = max(turn.token_ids.size + turn.max_tokens for turn in plan.sessions[0].turns)
    assert longest <= spec.context_tokens < spec.capacity_tokens


def test_trace_without_sessions_is_squeezed_into_a_few_seconds() -> None:
    rows = tuple(Session(f"r{n}", "", (Turn(0, 0, (0, n), 1024, 5),), start_ms=n * 1000.0) for n in range(300))
    trace = Trace(512, GLOBAL_SCOPE, rows)
    chosen = settings(trace)

    plan = make_plan(cut(trace, chosen.cut).trace, chosen.scale, seed=1)
    assert (plan.requests, chosen.scale.block_tokens) == (105, 64)
    assert plan.sessions[-1].turns[0].due_ms == pytest.approx(3000.0)
