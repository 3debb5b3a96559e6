"""All drills on processes, some on real engines, and the whole search for planted defects: too long for each change."""

from __future__ import annotations

import asyncio
import secrets

import pytest
from bench.drills.staging import staged

from kvrelay.lab.drills.catalog import ALL
from kvrelay.lab.drills.drill import Drill
from kvrelay.lab.drills.fleets.attached import AttachedFleet, attached_processes
from kvrelay.lab.drills.fleets.mock import MockProcessFleet
from kvrelay.lab.drills.fleets.staging_file import read_fleet
from kvrelay.lab.drills.fuzz.play import play
from kvrelay.lab.drills.fuzz.schedule import schedule_of
from kvrelay.lab.drills.run import run_drill
from tests.lab.drills.mutants import MUTANTS, RARE, RARE_SEED
from tests.lab.drills.planting import FUZZ, Mutant
from tests.lab.drills.test_mutants import SEARCHED

pytestmark = pytest.mark.real


@pytest.mark.covers("DR-09", "DR-10", "DR-14")
@pytest.mark.parametrize("drill", ALL.values(), ids=list(ALL))
def test_the_drill_passes_on_processes(drill: Drill) -> None:
    result = asyncio.run(run_drill(drill, MockProcessFleet))
    assert [each for each in result.promises if each.verdict != "pass"] == []


@pytest.mark.timeout(600)  # two engines start, and drills of an outage wait for what comes after it
@pytest.mark.covers("OP-04", "DR-09", "DR-10", "RT-30")
@pytest.mark.parametrize(
    ("staging", "names"),
    [("versions", ("rolling-update",)), ("recompute", ("store-outage", "store-herd", "rollback"))],
)
def test_the_drills_pass_on_two_vllm_workers(staging: str, names: tuple[str, ...]) -> None:
    """Each staging is a pair of engines; `python -m bench.drills.real` runs all drills on all of them."""
    with staged(staging) as fleet:
        target = read_fleet(fleet.file, [each for each in fleet.confirmed if "=" in each])
        attached = attached_processes(target)
        for name in names:
            drill = ALL[name].afresh(secrets.randbits(32))
            result = asyncio.run(run_drill(drill, lambda drill: AttachedFleet(drill, target, attached)))
            assert result.cannot is None
            assert [each for each in result.promises if each.verdict != "pass"] == []


@pytest.mark.cpu_bound
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each.caught_by == FUZZ], ids=lambda each: each.name)
def test_the_fuzz_finds_the_defect_within_its_seeds(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    assert any(play(schedule_of(seed)) is not None for seed in range(SEARCHED))


@pytest.mark.cpu_bound
@pytest.mark.timeout(600)
def test_the_fuzz_finds_a_defect_of_one_in_a_thousand_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    RARE.plant(monkeypatch)
    assert next(seed for seed in range(1_000) if play(schedule_of(seed)) is not None) == RARE_SEED
