"""The attack on simulated fleets: it finds nothing in what is right, and makes small what it finds elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.core.load.ledger import Ledger
from kvrelay.lab.drills.fuzz.campaign import keep, play_seeds, read_kept
from kvrelay.lab.drills.fuzz.play import Run, play
from kvrelay.lab.drills.fuzz.schedule import Ask, schedule_of
from kvrelay.lab.drills.fuzz.shrink import kind_of


@pytest.mark.covers("DR-13")
def test_a_few_seeds_hold() -> None:
    assert play_seeds(range(7000, 7030)) == ()


def test_what_others_evict_between_a_write_and_its_announcement_is_no_fault_of_the_writer() -> None:
    assert play_seeds(range(2194, 2195)) == ()


def test_a_schedule_is_the_same_for_ever() -> None:
    assert schedule_of(3) == schedule_of(3) != schedule_of(4)
    first, second = Run(schedule_of(3)), Run(schedule_of(3))
    assert first.play() is second.play() is None
    assert first.world.digest() == second.world.digest()


def test_a_failure_is_shrunk_and_plays_again_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = Ledger.settle

    def leaks(self: Ledger, now: float, request_id: str, **more: int | None) -> bool:
        return request_id != "r3" and right(self, now, request_id, **more)

    monkeypatch.setattr(Ledger, "settle", leaks)
    (found,) = play_seeds(range(5, 6))
    assert [op.id for op in found.shrunk.ops if isinstance(op, Ask)][-1:] == [
        "r3"
    ] and found.ops <= 2 < found.ops_before
    file = tmp_path / "seed-5.json"
    keep(found, file)
    again = play(read_kept(file))
    assert again is not None and kind_of(again) == kind_of(found.failure)
    monkeypatch.setattr(Ledger, "settle", right)
    assert play(read_kept(file)) is None
