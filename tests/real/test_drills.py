"""All drills on processes, and the whole search for planted defects: too long for every change."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.lab.drills.catalog import ALL
from kvrelay.lab.drills.drill import Drill
from kvrelay.lab.drills.fleets.mock import MockProcessFleet
from kvrelay.lab.drills.fuzz.play import play
from kvrelay.lab.drills.fuzz.schedule import schedule_of
from kvrelay.lab.drills.run import run_drill
from tests.lab.drills.mutants import FUZZ, MUTANTS, RARE, RARE_SEED, Mutant
from tests.lab.drills.test_mutants import SEARCHED

pytestmark = pytest.mark.real


@pytest.mark.covers("DR-09", "DR-10", "DR-14")
@pytest.mark.parametrize("drill", ALL.values(), ids=list(ALL))
def test_the_drill_passes_on_processes(drill: Drill) -> None:
    result = asyncio.run(run_drill(drill, MockProcessFleet))
    assert [each for each in result.promises if each.verdict != "pass"] == []


@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each.caught_by == FUZZ], ids=lambda each: each.name)
def test_the_fuzz_finds_the_defect_within_its_seeds(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    assert any(play(schedule_of(seed)) is not None for seed in range(SEARCHED))


def test_the_fuzz_finds_a_defect_of_one_in_a_thousand_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    RARE.plant(monkeypatch)
    assert next(seed for seed in range(1_000) if play(schedule_of(seed)) is not None) == RARE_SEED
