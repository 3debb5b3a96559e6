"""The tier machine in ten thousand random runs; needs no server, only time."""

from __future__ import annotations

import pytest

from tests.core.tiers.test_lifecycle import taken_in

RUNS = 10_000


@pytest.mark.real
@pytest.mark.cpu_bound
@pytest.mark.timeout(600)
@pytest.mark.covers("CN-03")
def test_ten_thousand_runs_take_no_illegal_step() -> None:
    taken = taken_in(RUNS)
    assert min(taken[step] for step in ("publish", "ready", "decode")) > RUNS / 10, taken
