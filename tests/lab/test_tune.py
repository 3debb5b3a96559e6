from __future__ import annotations

import msgspec
import pytest
from tests.lab.made_up_run import made_up_run

from kvrelay.core.traces.trace import TraceError
from kvrelay.lab.arms.results import PolicyResult
from kvrelay.lab.replay.trace_file import bundled_trace
from kvrelay.lab.tune.halves import halves
from kvrelay.lab.tune.sweep import Slo, Sweep, pick
from kvrelay.lab.tune.table import sweep_table

MEASURED = made_up_run().measured


def vector(p95_ms: float | None, hits: int, failures: int = 0) -> PolicyResult:
    any_result = MEASURED.results["sticky"]
    ttft_ms = msgspec.structs.replace(any_result.ttft_ms, p95=p95_ms)
    return msgspec.structs.replace(any_result, ttft_ms=ttft_ms, actual_cached_tokens=hits, failures=failures)


@pytest.mark.covers("RT-12")
@pytest.mark.parametrize(
    ("results", "picked"),
    [
        ({"a": vector(400, 100), "b": vector(500, 200), "c": vector(601, 900)}, "b"),
        ({"a": vector(400, 100), "b": vector(300, 100)}, "b"),
        ({"a": vector(300, 100), "b": vector(300, 100)}, "a"),
        ({"a": vector(300, 900, failures=1), "b": vector(300, 100)}, "b"),
        ({"a": vector(None, 900), "b": vector(600, 1)}, "b"),
        ({"a": vector(700, 900), "b": vector(601, 1)}, None),
    ],
)
def test_pick_follows_the_stated_rule(results: dict[str, PolicyResult], picked: str | None) -> None:
    slo = Slo(ttft_p95_ms=600.0)
    assert pick(results, {name: slo.passed_by(result) for name, result in results.items()}) == picked


@pytest.mark.covers("RT-12")
def test_table_says_pass_fail_or_unknown_for_every_vector() -> None:
    results = {"1,0,0,0": vector(700, 9), "1,1,0,0": vector(100, 5), "0,1,0,0": vector(None, 0)}
    slo = Slo(600.0)
    measured = msgspec.structs.replace(MEASURED, results=results)
    passed = {name: slo.passed_by(result) for name, result in results.items()}

    table = sweep_table(Sweep(measured, slo.rule(), passed, pick(results, passed)))

    assert [row[:2] for row in table.rows] == [("1,0,0,0", "fail"), ("1,1,0,0 (pick)", "pass"), ("0,1,0,0", "unknown")]
    assert table.emphasis == (False, True, False)


def test_the_control_has_no_outcome() -> None:
    results = {"round_robin": vector(900, 1), "1,0,0,0": vector(100, 5)}
    measured = msgspec.structs.replace(MEASURED, results=results)

    table = sweep_table(Sweep(measured, "rule", {"1,0,0,0": True}, "1,0,0,0"))
    assert [row[1] for row in table.rows] == ["control", "pass"]


@pytest.mark.covers("RT-12")
def test_halves_share_no_session_and_keep_sub_agents_with_their_parents() -> None:
    trace = bundled_trace().trace
    training, held_out = halves(trace, seed=3)

    roots = [{session.parent_id or session.session_id for session in half.sessions} for half in (training, held_out)]
    assert not roots[0] & roots[1] and abs(len(roots[0]) - len(roots[1])) <= 1
    assert training.requests + held_out.requests == trace.requests
    assert halves(trace, seed=3)[0] == training and halves(trace, seed=4)[0] != training
    with pytest.raises(TraceError):
        halves(msgspec.structs.replace(trace, sessions=trace.sessions[:1]), seed=3)
