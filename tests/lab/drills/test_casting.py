"""Who plays whom where a fleet has fewer workers than a drill names."""

from __future__ import annotations

import pytest

from kvrelay.core.model.units import Trigger
from kvrelay.lab.drills.actions import AddWorker, Kill, RemoveWorker, Rotate
from kvrelay.lab.drills.catalog import ALL
from kvrelay.lab.drills.fleets.base import CannotDo
from kvrelay.lab.drills.fleets.casting import cast


@pytest.mark.parametrize(
    ("drill", "revisions", "entries", "left_out"),
    [
        ("worker-loss", ["", "", ""], {"w0": 0, "w1": 1, "w2": 2}, ()),
        ("worker-loss", ["", ""], {"w0": 0, "w1": 1}, ("w2",)),
        ("rolling-update", ["", "v2"], {"w0": 0, "n0": 1}, ("w1", "n1")),
        ("rolling-update", ["v2", "", "v2", ""], {"w0": 1, "n0": 0, "w1": 3, "n1": 2}, ()),
        ("rotation-tokenizer", ["", ""], {"w0": 0, "n0": 1}, ("w1", "n1")),
        ("store-revisions", ["v2", ""], {"w0": 1, "w1": 0}, ()),
    ],
)
def test_workers_are_dealt_out_so_that_old_and_new_are_both_there(
    drill: str, revisions: list[str], entries: dict[str, int], left_out: tuple[str, ...]
) -> None:
    dealt = cast(ALL[drill], revisions)
    dealt.must_be_enough()
    assert (dealt.entries, dealt.left_out) == (entries, left_out)


def test_without_anybody_of_the_new_version_there_is_no_rolling_update() -> None:
    with pytest.raises(CannotDo, match="wants a worker of revision `v2` as `n0`, and the fleet has none to spare"):
        cast(ALL["rolling-update"], ["", ""]).must_be_enough()


def test_what_concerns_nobody_is_left_undone() -> None:
    dealt = cast(ALL["rolling-update"], ["", "v2"])
    assert dealt.plays(AddWorker("n1", "v2")) is None is dealt.plays(RemoveWorker("w1"))
    assert dealt.plays(Rotate(Trigger.REVISION, keep=("n0", "n1"))) == Rotate(Trigger.REVISION, keep=("n0",))
    assert dealt.plays(Kill("w0")) == Kill("w0")
