"""Drills on real processes; all of them are in the long suite."""

from __future__ import annotations

import asyncio
import sys

import pytest

from kvrelay.lab.drills.catalog import ALL
from kvrelay.lab.drills.fleets.mock import MockProcessFleet
from kvrelay.lab.drills.fleets.other_router import OtherRouter
from kvrelay.lab.drills.run import run_drill


@pytest.mark.covers("DR-06")
@pytest.mark.parametrize("name", ["gap-inner", "stale-session"])
def test_the_drill_passes_on_processes(name: str) -> None:
    result = asyncio.run(run_drill(ALL[name], MockProcessFleet))
    assert [each for each in result.promises if each.verdict != "pass"] == []


def test_of_another_router_only_what_clients_see_is_judged() -> None:
    """A plain relay stands in: it sends everything to one worker and shows nothing of itself."""
    relay = f"{sys.executable} -m tests.lab.drills.plain_relay {{port}} {{workers}}"
    result = asyncio.run(run_drill(ALL["gap-inner"], lambda drill: MockProcessFleet(drill, front=OtherRouter(relay))))
    verdicts = {each.promise: each.verdict for each in result.promises}
    for seen in ("every request ends exactly once", "no answer was made with KV that is not its own"):
        assert verdicts[seen] == "pass"
    assert verdicts["claims equal the truth (end)"] == verdicts["`event_gap` is reported (at least 1)"] == "unknown"
    assert result.verdict == "unknown"
