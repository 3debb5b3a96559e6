"""Ports that stay free for who comes back to them."""

from __future__ import annotations

import socket

from kvrelay.edge.system import ports
from kvrelay.edge.system.ports import spare_port
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
