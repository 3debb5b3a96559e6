"""How soon does the worker learn that a client has left? Through the gateway process, to a mock worker process.

The client notes the moment before it closes its socket; the worker notes when it sees its connection close, on the same
host's monotonic clock. Three situations: before the answer's head, in mid-stream, in a silent gap of a stream.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from bench.figure import Figure
from bench.gateway import serve_arguments, wait_routable
from bench.rig.processes import cores, pinned
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec

TRIES = 50
LIMIT_MS = 20.0
SETTLE_S = 0.03
PROMPT_TOKENS = 400
SLOW = MockSpec(name="slow", prefill_tokens_per_s=200.0)  # two seconds of prefill
QUICK = MockSpec(name="quick", decode_ms=5.0)
SILENT_AFTER_CHUNKS = 2


def run() -> list[Figure]:
    return [
        _case("before the answer's head", SLOW, None, lambda client: None),
        _case("in mid-stream", QUICK, None, _read_chunks),
        _case("in a silent gap", QUICK, {"kind": "hang", "after_chunks": SILENT_AFTER_CHUNKS}, _read_chunks),
    ]


def _case(name: str, spec: MockSpec, fault: dict[str, Any] | None, wait: Callable[[socket.socket], None]) -> Figure:
    core, _ = cores()
    with MockFleet([spec]) as fleet:
        worker = fleet.workers[0].url
        with pinned(serve_arguments([worker], "round_robin"), core=core) as gateway:
            wait_routable(gateway.ready["admin_url"], 1)
            if fault is not None:
                _post(f"{worker}/mock/faults", fault)
            left_at = [_leave(gateway.ready["url"], f"{spec.name}-{number}", wait) for number in range(TRIES)]
            time.sleep(0.3)
            seen_at = {each["request_id"]: each["seen_at"] for each in _get(f"{worker}/mock/state")["aborts"]}
    delays_ms = sorted((seen_at[f"{spec.name}-{number}"] - moment) * 1000 for number, moment in enumerate(left_at))
    p95_ms = delays_ms[-(-95 * TRIES // 100) - 1]
    return Figure(f"client leaves {name}: worker knows, p95 of {TRIES}", p95_ms, "ms", LIMIT_MS)


def _leave(url: str, request_id: str, wait: Callable[[socket.socket], None]) -> float:
    asked = {"model": "mock-model", "prompt": list(range(PROMPT_TOKENS)), "max_tokens": 1000, "stream": True}
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as client:
        client.sendall(head.encode() + body)
        wait(client)
        time.sleep(SETTLE_S)
        return time.monotonic()


def _read_chunks(client: socket.socket) -> None:
    received = b""
    while received.count(b"data: ") < SILENT_AFTER_CHUNKS:
        data = client.recv(65536)
        assert data, received
        received += data


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def _post(url: str, body: Any) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=10):
        return


if __name__ == "__main__":
    for figure in run():
        print(f"{figure.name}: {figure.value:.2f} {figure.unit} (limit {figure.limit:g})")
