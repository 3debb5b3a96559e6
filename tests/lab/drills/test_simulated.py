"""Every drill passes on the simulated fleet, the same way each time; and none passes because it looked away."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvrelay.lab.drills.catalog import ALL
from kvrelay.lab.drills.drill import Drill
from kvrelay.lab.drills.fleets.simulated import SimulatedFleet
from kvrelay.lab.drills.history import History, View
from kvrelay.lab.drills.run import DrillResult, judge, run_drill


def play(drill: Drill, seed: int = 1) -> DrillResult:
    return asyncio.run(run_drill(drill, lambda each: SimulatedFleet(each, seed=seed)))


@pytest.mark.covers(
    "DR-01", "DR-02", "DR-03", "DR-04", "DR-05", "DR-06", "DR-07", "DR-08", "DR-09", "DR-10", "DR-11", "DR-12",
    "DR-13", "DR-14", "DR-15", "OP-04", "OP-10", "RT-22", "SG-16", "SG-19", "SG-20", "SG-21", "SG-22",
)  # fmt: skip
@pytest.mark.parametrize("drill", ALL.values(), ids=list(ALL))
def test_the_drill_passes(drill: Drill) -> None:
    result = play(drill)
    assert [each for each in result.promises if each.verdict != "pass"] == []
    assert result.verdict == "pass"


def test_the_same_seed_gives_the_same_history() -> None:
    first, second = play(ALL["worker-loss"], 5), play(ALL["worker-loss"], 5)
    assert msgspec.json.encode(first.history) == msgspec.json.encode(second.history)
    assert msgspec.json.encode(play(ALL["worker-loss"], 6).history) != msgspec.json.encode(first.history)


def test_where_nothing_was_observed_nothing_passes() -> None:
    """A judge that is shown clients' answers only must not be content with the rest."""
    drill = ALL["gap-inner"]
    played = play(drill).history
    blind = History(drill=drill.name, fleet="mock", deeds=played.deeds)
    unseen = {"receipt": None, "receipts": None, "texts": {}, "wrong_reuse_blocks": None, "worker": None}
    blind.outcomes += [msgspec.structs.replace(outcome, **unseen) for outcome in played.outcomes]
    blind.views += [View(label=view.label, at_s=view.at_s) for view in played.views]
    judged = {each.promise: each.verdict for each in judge(drill, "mock", blind).promises}
    assert judged["no answer was made with KV that is not its own"] == "unknown"
    assert judged["claims equal the truth (end)"] == "unknown"
    assert judged["every request ends exactly once"] == "pass"
