"""Keep, drop or unknown: of runs that never happened, with and without failures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.lab.made_up_run import TIER_ARMS, made_up_measured, write_run

from kvrelay.core.gates.tier import Decision
from kvrelay.lab.arms.contender import Contender
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.results import ArmData, policy_results
from kvrelay.lab.arms.run import read_back
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.arms.tier_verdict import NotComparable, Side, TierVerdict, tier_verdict

MEASURED = made_up_measured(settings=RunSettings(contenders=TIER_ARMS))


def ruled(
    measured: Measured, folder: Path, candidate: str = "gpu+cpu+remote", baseline: str = "gpu+cpu"
) -> TierVerdict:
    write_run(measured, folder)
    run = read_back(folder)
    return tier_verdict(Side(run, folder, baseline), Side(run, folder, candidate))


def changed(measured: Measured, policy: str, change: object) -> Measured:
    arms = tuple(change(data) if data.arm.policy == policy else data for data in measured.arms)  # type: ignore[operator]
    return msgspec.structs.replace(measured, arms=arms, results=policy_results(arms, measured.rows))


def slower(data: ArmData) -> ArmData:
    """The same hits, and a remote path that takes half a second."""
    samples = tuple(
        msgspec.structs.replace(one, ttft_ms=(one.ttft_ms or 0) + 500, ended_ms=one.ended_ms + 500)
        for one in data.samples
    )
    return msgspec.structs.replace(data, samples=samples)


def failing(data: ArmData) -> ArmData:
    """As fast as it is, and one request in ten fails."""
    samples = tuple(
        msgspec.structs.replace(one, failure="HTTP 503", http_status=503, ttft_ms=None, ttft_sent_ms=None,
                                first_token_ms=None, itl_ms=(), cached_tokens=None)
        if number % 10 == 9 else one
        for number, one in enumerate(data.samples)
    )  # fmt: skip
    return msgspec.structs.replace(data, samples=samples)


@pytest.mark.covers("TR-08")
def test_a_tier_that_is_faster_and_as_reliable_is_kept(tmp_path: Path) -> None:
    found = ruled(MEASURED, tmp_path)

    assert found.decision is Decision.KEEP, found.verdict.reasons
    assert found.tier == ("remote",)
    assert found.verdict.label == "mock" and found.verdict.promotion == "not_promotable"
    names = [gate.name for gate in found.verdict.gates]
    assert names[:2] == ["no more failures than the baseline", "no fewer tasks succeed than under the baseline"]


@pytest.mark.covers("TR-08")
def test_a_tier_with_more_hits_and_longer_waiting_is_dropped(tmp_path: Path) -> None:
    found = ruled(changed(MEASURED, "gpu+cpu+remote", slower), tmp_path)

    assert found.decision is Decision.DROP
    assert any(reason.startswith("full TTFT is surely lower") for reason in found.verdict.reasons)


@pytest.mark.covers("TR-08")
def test_a_tier_that_is_faster_and_fails_is_dropped(tmp_path: Path) -> None:
    found = ruled(changed(MEASURED, "gpu+cpu+remote", failing), tmp_path)

    assert found.decision is Decision.DROP
    failed = [gate.name for gate in found.verdict.gates if gate.outcome == "fail"]
    assert "no more failures than the baseline" in failed and "in no bucket more requests fail" in failed


@pytest.mark.covers("TR-08")
def test_too_few_repeats_prove_nothing(tmp_path: Path) -> None:
    few = made_up_measured(settings=RunSettings(contenders=TIER_ARMS, repeats=2))
    found = ruled(few, tmp_path)

    assert found.decision is Decision.UNKNOWN
    assert any("2 of at least 3 repeats" in reason for reason in found.verdict.reasons)


@pytest.mark.covers("TR-08")
def test_two_runs_of_one_plan_are_compared_and_other_plans_are_not(tmp_path: Path) -> None:
    write_run(MEASURED, tmp_path / "one")
    write_run(made_up_measured(seed=6, settings=RunSettings(contenders=TIER_ARMS)), tmp_path / "two")
    one, two = (read_back(tmp_path / name) for name in ("one", "two"))

    found = tier_verdict(Side(one, tmp_path / "one", "gpu"), Side(two, tmp_path / "two", "gpu+cpu"))
    assert (found.decision, found.tier) == (Decision.KEEP, ("cpu",))

    write_run(made_up_measured(settings=RunSettings(contenders=TIER_ARMS, seed=9)), tmp_path / "other")
    other = read_back(tmp_path / "other")
    with pytest.raises(NotComparable, match="plans differ"):
        tier_verdict(Side(one, tmp_path / "one", "gpu"), Side(other, tmp_path / "other", "gpu+cpu"))


@pytest.mark.covers("TR-08", "TR-09")
def test_arms_that_differ_in_two_tiers_or_in_the_router_have_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match="cpu and remote beyond"):
        ruled(MEASURED, tmp_path / "a", "gpu+cpu+remote", "gpu")

    other = Contender("gpu+cpu", {"gateway.policy": "sticky"}, TIER_ARMS[1].store)
    with pytest.raises(NotComparable, match=r"`gateway.policy` is `cache_load` and `sticky`"):
        ruled(
            made_up_measured(settings=RunSettings(contenders=(TIER_ARMS[0], other))), tmp_path / "b", "gpu+cpu", "gpu"
        )


@pytest.mark.covers("TR-08")
def test_two_runs_say_what_their_workers_were_started_with(tmp_path: Path) -> None:
    plain = Contender("cache_load", {"gateway.policy": "cache_load"})

    def side(name: str, tiering: str | None) -> Side:
        measured = made_up_measured(settings=RunSettings(contenders=(plain,)))
        observed = tuple(
            msgspec.structs.replace(
                one, processes=tuple(msgspec.structs.replace(each, tiering=tiering) for each in one.processes)
            )
            for one in measured.manifest.observed
        )
        manifest = msgspec.structs.replace(measured.manifest, observed=observed)
        write_run(msgspec.structs.replace(measured, manifest=manifest), tmp_path / name)
        return Side(read_back(tmp_path / name), tmp_path / name, "cache_load")

    without, with_tier, unseen = side("a", "none"), side("b", "HiCache"), side("c", None)
    assert tier_verdict(without, with_tier).tier == ("HiCache",)
    assert tier_verdict(without, unseen).tier == ()
    with pytest.raises(NotComparable, match="both runs were started with the same tiers: none"):
        tier_verdict(without, side("d", "none"))
