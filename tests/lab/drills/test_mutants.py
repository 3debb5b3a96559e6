"""Every planted defect is found by the check that is named for it; the whole search is in the long suite."""

from __future__ import annotations

import asyncio

import pytest
from tests.lab.drills.mutants import FOUND_BY_SEED, MUTANTS, RARE, RARE_SEED
from tests.lab.drills.planting import FUZZ, Mutant

from kvrelay.lab.drills.catalog import ALL
from kvrelay.lab.drills.fleets.simulated import SimulatedFleet
from kvrelay.lab.drills.fuzz.play import play
from kvrelay.lab.drills.fuzz.schedule import schedule_of
from kvrelay.lab.drills.run import run_drill

SEARCHED = 200


def is_caught(mutant: Mutant, seed: int) -> bool:
    """By its drill, or by this seed of the fuzz. A defect that stops the drill itself is found as well."""
    if mutant.caught_by == FUZZ:
        return play(schedule_of(seed)) is not None
    try:
        return asyncio.run(run_drill(ALL[mutant.caught_by], SimulatedFleet)).verdict == "fail"
    except (AssertionError, LookupError):
        return True


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_defect_is_found_by_its_check(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = FOUND_BY_SEED.get(mutant.name, 0)
    if mutant.caught_by == FUZZ:
        assert seed < SEARCHED
        assert play(schedule_of(seed)) is None, "the seed fails without any defect"
    mutant.plant(monkeypatch)
    assert is_caught(mutant, seed)


def test_a_defect_of_one_in_a_thousand_schedules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search from seed 0 on is in the long suite."""
    assert play(schedule_of(RARE_SEED)) is None, "the seed fails without any defect"
    RARE.plant(monkeypatch)
    assert [seed for seed in range(RARE_SEED - 10, RARE_SEED + 1) if play(schedule_of(seed))] == [RARE_SEED]


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 20 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
