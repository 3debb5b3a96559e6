"""Makes a failing schedule small: whatever can be left out, so that it still fails in the same way, is left out.

Delta debugging (Zeller and Hildebrandt 2002) over the ops, from halves down to single ones, within a budget of plays.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from kvrelay.lab.drills.fuzz.play import Failure, play
from kvrelay.lab.drills.fuzz.schedule import Op, Schedule

MAX_PLAYS = 300


def kind_of(failure: Failure) -> str:
    """What failed, without the names and numbers that differ from play to play."""
    return re.sub(r"\d+", "#", f"{failure.where.partition(' <- ')[0].partition(':')[0]}|{failure.what}")[:60]


def shrink(
    schedule: Schedule, failure: Failure, *, play: Callable[[Schedule], Failure | None] = play
) -> tuple[Schedule, Failure]:
    """The smallest that was found, and how it fails."""
    wanted, plays = kind_of(failure), 0
    ops, size = schedule.ops, max(1, len(schedule.ops) // 2)
    while size and plays < MAX_PLAYS:
        at, thinner = 0, False
        while at < len(ops) and plays < MAX_PLAYS:
            rest = ops[:at] + ops[at + size :]
            plays += 1
            again = _fails(schedule, rest, wanted, play)
            if again is None:
                at += size
            else:
                ops, failure, thinner = rest, again, True
        if not thinner or size > 1:
            size //= 2
    return replace(schedule, ops=ops), failure


def _fails(
    schedule: Schedule, ops: tuple[Op, ...], wanted: str, play: Callable[[Schedule], Failure | None]
) -> Failure | None:
    again = play(replace(schedule, ops=ops))
    return again if again is not None and kind_of(again) == wanted else None
