"""One pair of mock worker processes for the read-mostly tests, and a small client that shows everything it gets."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def chunks(self) -> list[Any]:
        """The JSON of all events of a stream; the end marker must be there, and last."""
        events = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        assert events[-1] == b"[DONE]", events
        return [json.loads(event) for event in events[:-1]]


class Client:
    """Blocking, one connection per request."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        self.host, self.port = address.hostname, address.port

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            data = response.read()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, data)
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, payload: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.ask(
            "POST", path, json.dumps(payload).encode(), {"content-type": "application/json", **(headers or {})}
        )

    def complete(self, **body: Any) -> Answer:
        return self.post("/v1/completions", body)

    def state(self) -> Any:
        return self.get("/mock/state").json()

    def fault(self, **fault: Any) -> Any:
        answer = self.post("/mock/faults", fault)
        assert answer.status == 200, answer.body
        return answer.json()


QUICK = MockSpec(
    name="quick",
    adapters=("ad-x", "ad-y"),
    prefill_tokens_per_s=1e6,
    decode_ms=0.5,
    step_overhead_ms=0.0,
    max_model_len=4096,
    drain_s=5.0,
)


@pytest.fixture(scope="session")
def shared_worker() -> Iterator[RunningWorker]:
    """A fast worker that many tests talk to; they leave no faults behind."""
    with MockFleet([QUICK]) as fleet:
        yield fleet.workers[0]


@pytest.fixture
def client(shared_worker: RunningWorker) -> Iterator[Client]:
    client = Client(shared_worker.url)
    yield client
    client.ask("DELETE", "/mock/faults")


@pytest.fixture
def start() -> Iterator[Callable[..., RunningWorker]]:
    """Start a worker of one's own: `start(decode_ms=5)`."""
    fleets: list[MockFleet] = []

    def start_one(**members: Any) -> RunningWorker:
        fleet = MockFleet([MockSpec(**{"name": "own", "drain_s": 2.0, **members})])
        fleet.start()
        fleets.append(fleet)
        return fleet.workers[0]

    yield start_one
    for fleet in fleets:
        fleet.stop()
