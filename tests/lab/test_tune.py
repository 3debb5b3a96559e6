from __future__ import annotations

import msgspec
import pytest
from tests.lab.made_up_run import made_up_run

from kvrelay.lab.arms.results import PolicyResult
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
    assert pick(results, Slo(ttft_p95_ms=600.0)) == picked


@pytest.mark.covers("RT-12")
def test_table_says_pass_fail_or_unknown_for_every_vector() -> None:
    results = {"1,0,0,0": vector(700, 9), "1,1,0,0": vector(100, 5), "0,1,0,0": vector(None, 0)}
    slo = Slo(600.0)
    measured = msgspec.structs.replace(MEASURED, results=results)
    passed = {name: slo.passed_by(result) for name, result in results.items()}

    table = sweep_table(Sweep(measured, slo, passed, pick(results, slo)))

    assert [row[:2] for row in table.rows] == [("1,0,0,0", "fail"), ("1,1,0,0 (pick)", "pass"), ("0,1,0,0", "unknown")]
    assert table.emphasis == (False, True, False)
