"""From one list of workers to the next."""

from __future__ import annotations

import pytest

from kvrelay.edge.fleet.change import FleetChange, WorkerClash, fleet_change
from kvrelay.edge.system.config import WorkerConfig


def worker(name: str, port: int = 0, **more: object) -> WorkerConfig:
    return WorkerConfig.model_validate({"name": name, "url": f"http://h:{port or ord(name)}", **more})


A, B, C = worker("a"), worker("b"), worker("c")


def change(before: list[WorkerConfig], after: list[WorkerConfig], running: list[WorkerConfig]) -> FleetChange:
    return fleet_change(before, after, {each.name: each for each in running})


def test_what_is_new_comes_what_is_missing_goes_and_the_rest_stays() -> None:
    assert change([A, B], [B, C], [A, B]) == FleetChange(("a",), (C,), (B,))


def test_other_settings_make_another_worker() -> None:
    limited = worker("a", max_active_requests=3)
    assert change([A], [limited], [A]) == FleetChange(("a",), (limited,), ())


def test_what_was_done_on_the_admin_port_stays_unless_the_file_says_something_new() -> None:
    assert change([A], [A], [A, C]) == FleetChange((), (), (A, C)), "added there"
    assert change([A, B], [A, B], [A]) == FleetChange((), (), (A,)), "removed there"
    assert change([A], [A, C], [A, C]) == FleetChange((), (), (A, C)), "added there, then written down as it is"
    assert change([A], [], []) == FleetChange((), (), ()), "removed in both places"


def test_workers_may_swap_their_names() -> None:
    swapped = [worker("a", ord("b")), worker("b", ord("a"))]
    assert change([A, B], swapped, [A, B]) == FleetChange(("a", "b"), tuple(swapped), ())


def test_a_name_or_url_that_is_taken_on_the_admin_port_is_named() -> None:
    with pytest.raises(WorkerClash, match=r"worker `x` at http://h:97 clashes with `a` at http://h:97"):
        change([], [worker("x", ord("a"))], [A])
