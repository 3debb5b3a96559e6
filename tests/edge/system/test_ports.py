"""Ports that stay free for who comes back to them."""

from __future__ import annotations

import socket

import pytest

from kvrelay.edge.system import ports
from kvrelay.edge.system.ports import spare_port
from kvrelay.edge.worker import publisher, worker
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec


def of_the_kernel() -> range:
    first, last = ports._outgoing_range()
    return range(first, last + 1)


def test_no_outgoing_connection_gets_a_spare_port() -> None:
    drawn = [spare_port() for _ in range(100)]
    assert not set(drawn) & set(of_the_kernel()) and len(set(drawn)) > 50


def test_a_spare_port_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert not ports._is_free("127.0.0.1", taken.getsockname()[1])


def test_all_addresses_of_a_mock_worker_are_such_that_its_next_life_gets_them_again() -> None:
    with MockFleet([MockSpec(name="a")]) as fleet:
        worker = fleet.workers[0]
        addresses = (worker.url, worker.events, worker.replay)
        assert all(int(str(each).rpartition(":")[2]) not in of_the_kernel() for each in addresses)
        again = fleet.restart("a")
        assert (again.url, again.events, again.replay) == addresses and again.incarnation != worker.incarnation


async def test_who_is_given_a_taken_port_takes_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice of a port and the call that listens, somebody else may have been quicker."""
    with socket.socket() as quicker:
        quicker.bind(("127.0.0.1", 0))
        quicker.listen()
        taken = quicker.getsockname()[1]
        for module in (worker, publisher):
            given = iter([taken, spare_port(), spare_port()])
            monkeypatch.setattr(module, "spare_port", lambda *_, given=given: next(given))
        life = worker.Worker(MockSpec(name="a", replay="none"))
        try:
            ready = await life.start()
            assert str(taken) not in f"{ready.url} {ready.events}"
        finally:
            await life.stop()
