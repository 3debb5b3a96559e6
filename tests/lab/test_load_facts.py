from __future__ import annotations

import msgspec
import pytest
from tests.lab.made_up_run import made_up_measured

from kvrelay.lab.arms.settings import Reset, RunSettings
from kvrelay.lab.report.load_facts import cold_starts, sending_of


def test_every_contender_says_whether_it_was_an_open_loop() -> None:
    measured = made_up_measured()

    found = sending_of(measured)

    assert list(found) == list(measured.results)
    for policy, facts in found.items():
        own = [sample for data in measured.arms if data.arm.policy == policy for sample in data.samples]
        assert (facts.requests, facts.open_loop, facts.max_in_flight) == (len(own), True, None)


@pytest.mark.covers("BM-34")
def test_cold_starts_are_known_where_workers_began_with_the_arm() -> None:
    measured = made_up_measured()

    found = cold_starts(measured)

    assert list(found) == [data.arm.name for data in measured.arms]
    for data in measured.arms:
        waves = found[data.arm.name]
        assert [wave.worker for wave in waves] == list(data.workers)
        answered = sum(sample.ok and sample.ttft_ms is not None for sample in data.samples)
        assert answered > 0
        assert sum(wave.wave_ttft_ms.count + wave.steady_ttft_ms.count for wave in waves) == answered


def test_workers_that_ran_before_have_no_cold_start() -> None:
    settings = msgspec.structs.replace(RunSettings(), reset=Reset.CACHE_SALT)

    assert cold_starts(made_up_measured(settings=settings)) == {}
