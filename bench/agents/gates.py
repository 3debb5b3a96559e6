"""What must hold, written before any run; each gate looks at every single repeat, never at a lucky mean."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from bench.agents.arms import Result
from kvrelay.core.stats.distribution import distribution

OURS, CONTROL = "cache_load", "round_robin"


class Gate(Struct, frozen=True):
    """One promise and what was measured for it."""

    promise: str
    measured: str
    kept: bool


def sessions(results: Sequence[Result]) -> list[Gate]:
    ours = [result for result in results if result.policy == OURS]
    faster = _p95(results, CONTROL) / _p95(results, OURS)
    return [
        _least("hits / prompt tokens", [each.hit_share for each in ours], 0.70),
        _most("prefilled tokens, max / mean", [each.prefilled_max_over_mean for each in ours], 1.10),
        _most("share of requests at the busier worker", [each.busiest_share for each in ours], 0.55),
        _least(f"p95 TTFT of {CONTROL} / ours, all repeats together", [faster], 1.8),
        _least("claims right to a block", [each.within_one_block for each in ours], 0.98),
        *_nobody_failed(results),
    ]


def hot_prefix(results: Sequence[Result]) -> list[Gate]:
    ours = [result for result in results if result.policy == OURS]
    return [
        _most("share of requests at the busier worker", [each.busiest_share for each in ours], 0.65),
        _most("computations of the hot prefix", [float(each.computations_of_hot) for each in ours], 2.0),
        *_nobody_failed(results),
    ]


def burst(results: Sequence[Result]) -> list[Gate]:
    ours = [result for result in results if result.policy == OURS]
    computed = [float(each.computations_of_hot) for each in ours]
    return [_most("computations of the new prefix", computed, 2.0), *_nobody_failed(results)]


def _p95(results: Sequence[Result], policy: str) -> float:
    value = distribution([ms for each in results if each.policy == policy for ms in each.ttft_ms]).p95
    assert value is not None, f"{policy} has no first tokens"
    return value


def _least(promise: str, measured: Sequence[float], bound: float) -> Gate:
    return Gate(f"{promise} >= {bound:g}", _listed(measured), bool(measured) and min(measured) >= bound)


def _most(promise: str, measured: Sequence[float], bound: float) -> Gate:
    return Gate(f"{promise} <= {bound:g}", _listed(measured), bool(measured) and max(measured) <= bound)


def _nobody_failed(results: Sequence[Result]) -> list[Gate]:
    failures = sum(result.failures for result in results)
    return [Gate("no request failed, under any policy", str(failures), failures == 0)]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
