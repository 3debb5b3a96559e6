"""The connector's port: it tells, and takes one order, from this machine and from no web page."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

from kvrelay.edge.connectors.vllm.kv.records import Records
from kvrelay.edge.connectors.vllm.kv.report import ReportServer
from kvrelay.edge.connectors.vllm.kv.switch import Switch

OFF = b'{"on": false}'


class _Standing:
    def told(self) -> dict[str, object]:
        return {}

    def told_in_full(self) -> dict[str, object]:
        return {"contract": None}


@pytest.fixture
def served() -> Iterator[tuple[ReportServer, Switch]]:
    switch = Switch()
    server = ReportServer("127.0.0.1:0", Records(), _Standing(), switch, settings={})
    yield server, switch
    server.close()


def ask(server: ReportServer, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, object]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_the_switch_is_told_and_thrown(served: tuple[ReportServer, Switch]) -> None:
    server, switch = served
    assert ask(server, "GET", "/sharing") == (200, {"on": True})
    assert ask(server, "PUT", "/sharing", OFF) == (200, {"on": False}) == ask(server, "GET", "/sharing")
    assert not switch.on
    assert ask(server, "PUT", "/sharing", b'{"on": true}') == (200, {"on": True})


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/sharing", b"", {}, 400),
        ("/sharing", b"{}", {}, 400),
        ("/sharing", b'{"on": "no"}', {}, 400),
        ("/sharing", b"\xff", {}, 400),
        ("/sharing", b"x" * 5000, {}, 400),
        ("/sharing", OFF, {"Origin": "http://page.example"}, 403),
        ("/stats", OFF, {}, 404),
    ],
)
def test_other_orders_change_nothing(
    served: tuple[ReportServer, Switch], path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    server, switch = served
    assert ask(server, "PUT", path, body, **headers)[0] == status
    assert switch.on
