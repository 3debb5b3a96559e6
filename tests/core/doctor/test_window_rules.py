"""The rules about a stretch of traffic, on figures made up for each of their answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.core.doctor.facts import Facts
from kvrelay.core.doctor.finding import Finding, Verdict, examine
from kvrelay.core.doctor.window import PromptClass, Timed, Window, WorkerWindow
from kvrelay.core.doctor.window_rules import WINDOW_RULES


def prompts(warm_ms: float, cold_ms: float, count: int = 50, name: str = "up to 4k") -> PromptClass:
    return PromptClass(name, Timed(warm_ms / 1e3, count), Timed(cold_ms / 1e3, count))


def worker(name: str, **more: Any) -> WorkerWindow:
    fine: dict[str, Any] = {
        "requests": 100,
        "active_requests": 2.0,
        "claimed_tokens": 50_000.0,
        "stale_claim_tokens": 100.0,
        "orphan_blocks": 3.0,
        "orphan_blocks_before": 3.0,
        "age_s": 90_000.0,
    }
    return WorkerWindow(name=name, **{**fine, **more})


WELL = Window(
    seconds=600,
    requests=200,
    failed=1,
    eligible_tokens=100_000,
    hit_tokens=70_000,
    lost_tokens={"prefix": 20_000, "residency": 10_000},
    prompt_classes=(prompts(100, 400),),
    remote_bytes=0,
    open_breakers=(),
    workers=(worker("a"), worker("b")),
)


def findings(window: Window | None) -> dict[str, Finding]:
    facts = Facts(policy="cache_load", workers=(), window=window)
    return {finding.code: finding for finding in examine(facts, WINDOW_RULES)}


def troubles(**changes: Any) -> dict[str, Verdict]:
    found = findings(msgspec.structs.replace(WELL, **changes))
    return {code: one.verdict for code, one in found.items() if one.verdict is not Verdict.OK}


def test_a_fleet_that_is_well_has_no_trouble_and_without_a_gateway_nothing_is_judged() -> None:
    assert troubles() == {}
    assert {one.verdict for one in findings(None).values()} == {Verdict.NOT_APPLICABLE}


WARM_IS_SLOW = {"prompt_classes": (prompts(390, 400),)}
HITS_ARE_RARE = {"hit_tokens": 5_000}


@pytest.mark.covers("OB-11", "OB-13")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (WARM_IS_SLOW, {"remote_slow": Verdict.WARN}),
        (HITS_ARE_RARE, {"capacity_or_chunk": Verdict.WARN}),
        ({**WARM_IS_SLOW, **HITS_ARE_RARE}, {}),  # hits would gain nothing and are few: neither is the trouble
        ({"workers": (worker("a", stale_claim_tokens=9_000), worker("b"))}, {"index_stale": Verdict.WARN}),
        ({"workers": (worker("a", active_requests=30.0), worker("b"))}, {"hot_worker": Verdict.WARN}),
        ({"workers": (worker("a", active_requests=7.0), worker("b", active_requests=0.0))}, {}),
        ({"workers": (worker("a", active_requests=30.0),)}, {"hot_worker": Verdict.NOT_APPLICABLE}),
        ({"open_breakers": ("remote",)}, {"breaker_open": Verdict.FAIL}),
        ({"open_breakers": None}, {"breaker_open": Verdict.NOT_APPLICABLE}),
        ({"workers": (worker("a", orphan_blocks=99.0), worker("b"))}, {"orphan_growth": Verdict.WARN}),
        ({"workers": (worker("a", age_s=30.0), worker("b"))}, {}),  # it hits well all the same
        ({"workers": (worker("a", age_s=30.0), worker("b")), "hit_tokens": 30_000}, {"cold_cache": Verdict.WARN}),
        ({"failed": 30}, {"requests_failing": Verdict.FAIL}),
    ],
)
def test_each_trouble_is_told_by_its_own_rule(changes: dict[str, Any], expected: dict[str, Verdict]) -> None:
    assert troubles(**changes) == expected


@pytest.mark.covers("OB-11")
@pytest.mark.parametrize(
    ("remote_bytes", "points_to"),
    [
        (5e9, "look at their latency"),
        (0, "look at the queues of the workers"),
        (None, "what was loaded from shared tiers is not known"),
    ],
)
def test_high_hits_without_a_gain_point_to_the_remote_path_or_to_queues(
    remote_bytes: float | None, points_to: str
) -> None:
    found = findings(msgspec.structs.replace(WELL, remote_bytes=remote_bytes, **WARM_IS_SLOW))["remote_slow"]
    assert points_to in found.detail
    assert "390 ms (p50 of 50) with a hit, 400 ms (p50 of 50) without" in found.detail
    assert found.cause and found.fix


@pytest.mark.covers("OB-07", "OB-10")
def test_of_too_little_traffic_nothing_is_said() -> None:
    few = WELL.prompt_classes[0].warm.count // 10
    assert troubles(prompt_classes=(prompts(390, 400, few),)) == {"remote_slow": Verdict.UNKNOWN}
    found = findings(Window(seconds=1, requests=2))
    assert {one.verdict for one in found.values()} == {Verdict.UNKNOWN, Verdict.NOT_APPLICABLE}
    assert found["remote_slow"].detail.startswith("insufficient_samples")


@pytest.mark.covers("OB-10")
def test_hits_that_nobody_reports_are_unknown_and_not_zero() -> None:
    found = findings(msgspec.structs.replace(WELL, hit_tokens=None))
    assert found["capacity_or_chunk"].verdict is Verdict.UNKNOWN
    assert found["capacity_or_chunk"].detail == "hits are not reported"
