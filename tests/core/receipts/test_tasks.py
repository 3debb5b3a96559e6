"""Sessions as tasks: when they are over, how they ended, and that no more are followed than allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.model.units import Status
from kvrelay.core.receipts.tasks import Task, TaskLedger, TaskOutcome
from tests.edge.observe.samples import receipt


def ledger(max_open: int = 100) -> TaskLedger:
    return TaskLedger(idle_s=10, max_open=max_open)


def turn(session: str | None, began_ms: float, status: Status = Status.OK, took_ms: float = 500) -> object:
    return receipt(session_id=session, arrived_ms=began_ms, e2e_ms=took_ms, status=status)


@pytest.mark.covers("OB-05")
@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ((Status.OK, Status.OK), TaskOutcome.OK),
        ((Status.OK, Status.ERROR, Status.OK), TaskOutcome.FAILED),
        ((Status.OK, Status.CLIENT_CANCELLED), TaskOutcome.CANCELLED),
        ((Status.REFUSED, Status.CLIENT_CANCELLED), TaskOutcome.FAILED),
        ((Status.WORKER_LOST,), TaskOutcome.FAILED),
    ],
)
def test_one_request_that_failed_spoils_the_task(statuses: tuple[Status, ...], outcome: TaskOutcome) -> None:
    tasks = ledger()
    for number, status in enumerate(statuses):
        tasks.observe(turn("s", 1000.0 * number, status))
    (task,) = tasks.settle(60_000)
    assert (task.outcome, task.requests, task.wall_ms) == (outcome, len(statuses), 1000.0 * (len(statuses) - 1) + 500)


def test_a_session_is_over_when_nothing_of_it_has_ended_for_the_idle_time() -> None:
    tasks = ledger()
    tasks.observe(turn("s", 0))
    assert tasks.settle(10_499) == []
    tasks.observe(turn("s", 10_400))
    assert tasks.settle(20_899) == []
    assert [task.wall_ms for task in tasks.settle(20_900)] == [10_900]
    assert tasks.settle(90_000) == []


def test_equal_names_of_different_tenants_are_different_tasks_and_no_name_is_none() -> None:
    tasks = ledger()
    tasks.observe(receipt(session_id="s", tenant="a"))
    tasks.observe(receipt(session_id="s", tenant="b"))
    tasks.observe(turn(None, 0))
    assert len(tasks.settle(1e9)) == 2


def test_what_is_beyond_the_bound_is_counted_and_not_guessed() -> None:
    tasks = ledger(max_open=1)
    for session in ("a", "b", "a"):
        tasks.observe(turn(session, 0))
    assert (len(tasks), tasks.not_followed) == (1, 1)
    (task,) = tasks.settle(1e9)
    assert (task.session, task.requests) == ("a", 2)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.sampled_from(list(Status)), st.integers(0, 2))))
def test_parts_of_several_processes_make_the_tasks_of_one(turns: list[tuple[str, int, Status, int]]) -> None:
    alone, group = ledger(), ledger()
    processes = [ledger() for _ in range(3)]
    for session, at_s, status, process in turns:
        one = turn(session, at_s * 1e3, status)
        alone.observe(one)
        processes[process].observe(one)
    for process in processes:
        for tenant, part in process.take_all():
            group.add(tenant, part)
        assert len(process) == 0

    def seen(tasks: TaskLedger) -> dict[str, Task]:
        return {task.session: task for task in tasks.settle(1e9)}

    assert seen(group) == seen(alone)
