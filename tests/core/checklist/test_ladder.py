"""Router, CPU tier, remote tier, split: no step before the one below has been shown."""

from __future__ import annotations

import pytest
from msgspec import structs

from kvrelay.core.checklist.dossier import Dossier, RunEvidence, TierCall
from kvrelay.core.checklist.ladder import ORDER, ladder
from kvrelay.core.gates.judge import Outcome
from tests.core.checklist.dossiers import DOSSIER, POLICIES, TIERS, arm, run, verdict

CPU_KEPT = TierCall("cpu", "gpu+cpu", "gpu", "keep", ())
REMOTE_KEPT = TierCall("remote", "gpu+cpu+remote", "gpu+cpu", "keep", ())


def of(*runs: RunEvidence) -> Dossier:
    return structs.replace(DOSSIER, runs=runs)


def opened(dossier: Dossier, *, rehearsal: bool = False) -> list[bool]:
    return [step.open for step in ladder(dossier, rehearsal=rehearsal)]


def tiers(*calls: TierCall) -> RunEvidence:
    return structs.replace(TIERS, tier_calls=calls)


@pytest.mark.covers("OP-12")
def test_each_step_opens_when_the_one_before_has_been_shown() -> None:
    assert [stage.value for stage in ORDER] == ["router", "cpu", "remote", "split"]
    assert opened(of()) == [True, False, False, False]
    assert opened(of(POLICIES)) == [True, True, False, False]
    assert opened(of(POLICIES, tiers(CPU_KEPT))) == [True, True, True, False]
    assert opened(of(POLICIES, tiers(CPU_KEPT, REMOTE_KEPT))) == [True, True, True, True]


@pytest.mark.covers("OP-12")
def test_a_later_step_that_was_shown_does_not_make_up_for_an_earlier_one() -> None:
    assert opened(of(tiers(CPU_KEPT, REMOTE_KEPT))) == [True, False, False, False]
    assert opened(of(POLICIES, tiers(REMOTE_KEPT))) == [True, True, False, False]


@pytest.mark.covers("OP-12")
@pytest.mark.parametrize("decision", ["drop", "unknown"])
def test_what_was_refuted_or_left_open_opens_nothing(decision: str) -> None:
    dossier = of(POLICIES, tiers(structs.replace(CPU_KEPT, decision=decision, reasons=("TTFT: higher",))))
    assert opened(dossier) == [True, True, False, False]
    assert "TTFT: higher" in ladder(dossier)[1].shown.reason


@pytest.mark.covers("OP-12")
def test_gates_that_failed_or_were_not_locked_open_nothing() -> None:
    for outcome in (Outcome.FAIL, Outcome.UNKNOWN):
        failed = structs.replace(POLICIES, verdict=verdict(outcome, "not_promotable"))
        assert opened(of(failed)) == [True, False, False, False]


@pytest.mark.covers("OP-12")
def test_mock_runs_are_rehearsals_and_count_only_when_that_is_said() -> None:
    mock = structs.replace(POLICIES, label="mock", hardware="mock")
    assert opened(of(mock)) == [True, False, False, False]
    assert "rehearsal" in ladder(of(mock))[0].shown.reason
    assert opened(of(mock), rehearsal=True) == [True, True, False, False]


def test_a_run_that_changes_router_and_tier_at_once_shows_neither() -> None:
    both = run(
        "runs/both",
        arm("round_robin", "round_robin"),
        arm("cache_load", "cache_load", added=("cpu",)),
        verdict=verdict(Outcome.PASS, "promotable"),
    )
    assert opened(of(both)) == [True, False, False, False]
