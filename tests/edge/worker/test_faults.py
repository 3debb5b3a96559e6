"""Faults: what is legal, when they strike, and what a client sees of each."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httptools
import pytest

from kvrelay.edge.worker.faults import FaultBook, FaultError, parse_fault
from kvrelay.edge.worker.launch import RunningWorker
from tests.edge.worker.conftest import Client


def kinds(book: FaultBook, path: str = "/v1/completions") -> list[str]:
    return [fault.kind for fault in book.strike_request(path)]


def book(*faults: dict[str, Any], seed: int = 0) -> FaultBook:
    made = FaultBook(seed)
    for fault in faults:
        made.add(parse_fault(fault))
    return made


@pytest.mark.parametrize(
    ("received", "words"),
    [
        ({"kind": "hnag"}, "did you mean `hang`?"),
        ({}, "`kind` is missing"),
        ({"kind": "delay", "msec": 5}, "did you mean `ms`?"),
        ({"kind": "delay", "ms": "long"}, "`$.ms`"),
        ({"kind": "delay", "ms": -1}, "`ms` of `delay` is out of range: -1"),
        ({"kind": "delay", "probability": 2}, "out of range: 2"),
        ({"kind": "delay", "count": 0}, "out of range: 0"),
        ({"kind": "500", "retry_after_s": 1}, "unknown parameter of `500`"),
        ({"kind": "corrupt_block", "count": 1}, "unknown parameter of `corrupt_block`"),
    ],
)
def test_an_illegal_fault_is_refused_with_the_nearest_legal_name(received: dict[str, Any], words: str) -> None:
    with pytest.raises(FaultError) as error:
        parse_fault(received)
    assert words in str(error.value)


def test_a_count_is_spent_and_then_gone() -> None:
    faults = book({"kind": "500", "count": 2})
    assert [kinds(faults) for _ in range(3)] == [["500"], ["500"], []]
    assert faults.active() == []


def test_delays_add_to_one_fault_of_another_kind() -> None:
    faults = book({"kind": "delay", "ms": 1}, {"kind": "429"}, {"kind": "503"}, {"kind": "delay", "ms": 2})
    assert kinds(faults) == ["delay", "429", "delay"]


def test_a_path_bounds_what_is_struck() -> None:
    faults = book({"kind": "500"}, {"kind": "503", "path": "/health"})
    assert kinds(faults, "/v1/models") == ["500"]
    assert kinds(faults, "/health") == ["503"]
    assert kinds(faults, "/metrics") == []


def test_a_probability_is_drawn_from_the_seed() -> None:
    def draw(seed: int) -> list[bool]:
        faults = book({"kind": "500", "probability": 0.5}, seed=seed)
        return [bool(kinds(faults)) for _ in range(64)]

    assert draw(1) == draw(1) != draw(2)
    assert 16 < sum(draw(1)) < 48


def test_batches_are_withheld_by_number_by_count_or_all() -> None:
    assert [book({"kind": "drop_event", "seq": 2}).withholds_batch(seq) for seq in range(4)] == [0, 0, 1, 0]
    counted = book({"kind": "drop_event", "count": 2})
    assert [counted.withholds_batch(seq) for seq in range(4)] == [1, 1, 0, 0]
    stopped = book({"kind": "stop_publishing"})
    assert [stopped.withholds_batch(seq) for seq in range(3)] == [1, 1, 1]
    assert kinds(stopped) == []


# --- over HTTP ---------------------------------------------------------------------------------------------------


def test_the_admin_path_shows_adds_and_clears(client: Client) -> None:
    assert client.get("/mock/faults").json() == {"faults": []}
    said = client.fault(kind="429", retry_after_s=7, count=3)
    assert said == {"faults": [{"kind": "429", "count": 3, "retry_after_s": 7, "remaining": 3}]}
    answer = client.complete(prompt="x", max_tokens=1)
    assert answer.status == 429 and answer.headers["retry-after"] == "7" and answer.headers["x-kvrelay-mock"] == "1"
    assert client.get("/mock/faults").json()["faults"][0]["remaining"] == 2
    assert client.ask("DELETE", "/mock/faults").json() == {"faults": []}
    assert client.complete(prompt="x", max_tokens=1).status == 200
    bad = client.post("/mock/faults", {"kind": "dely"})
    assert bad.status == 400 and "did you mean `delay`?" in bad.json()["error"]["message"]


@pytest.mark.parametrize("status", [500, 503])
def test_a_polite_refusal_has_its_status_and_an_error_body(client: Client, status: int) -> None:
    client.fault(kind=str(status), count=1)
    answer = client.complete(prompt="x", max_tokens=1)
    assert answer.status == answer.json()["error"]["code"] == status
    assert client.get("/health").status == 200, "health is struck only when its path is named"


def test_delay_holds_the_answer_back(client: Client) -> None:
    client.fault(kind="delay", ms=150, count=1)
    began_s = time.monotonic()
    assert client.complete(prompt="x", max_tokens=1).status == 200
    assert time.monotonic() - began_s >= 0.15


def test_refuse_closes_without_a_byte(client: Client) -> None:
    client.fault(kind="refuse", count=1)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        client.complete(prompt="x", max_tokens=1)


def test_refuse_with_a_listener_down_refuses_connections_for_a_while(start: Callable[..., RunningWorker]) -> None:
    client = Client(start().url)
    client.fault(kind="refuse", listener_down_s=0.5, count=1)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        client.complete(prompt="x", max_tokens=1)
    with pytest.raises(ConnectionRefusedError):
        client.get("/health")
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            assert client.get("/health").status == 200
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError("the listener did not come back")


def test_garbage_is_no_http(client: Client) -> None:
    client.fault(kind="garbage", count=1)
    with socket.create_connection((client.host, client.port), timeout=5) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = b""
        while data := raw.recv(4096):
            received += data
    with pytest.raises(httptools.HttpParserError):
        httptools.HttpResponseParser(object()).feed_data(received)


def read_stream(client: Client, max_tokens: int) -> bytes:
    """The bytes of a stream until it ends, breaks or falls silent for half a second."""
    connection = http.client.HTTPConnection(client.host, client.port, timeout=0.5)
    body = json.dumps({"prompt": "x", "max_tokens": max_tokens, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    received = b""
    try:
        response = connection.getresponse()
        while data := response.read1():
            received += data
    except (TimeoutError, http.client.IncompleteRead, ConnectionResetError):
        pass
    finally:
        connection.close()
    return received


def test_hang_keeps_the_connection_open_and_says_nothing_more(client: Client) -> None:
    aborts = client.state()["aborts_total"]
    client.fault(kind="hang", after_chunks=2, count=1)
    received = read_stream(client, 6)
    assert received.count(b"data: ") == 2 and b"[DONE]" not in received
    client.fault(kind="hang", count=1)
    with pytest.raises(TimeoutError):
        connection = http.client.HTTPConnection(client.host, client.port, timeout=0.3)
        connection.request("GET", "/v1/models")
        try:
            connection.getresponse()
        finally:
            connection.close()
    deadline = time.monotonic() + 5.0
    while client.state()["aborts_total"] < aborts + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.state()["aborts_total"] == aborts + 2, "a client that gives up on a hang is an abort"


@pytest.mark.covers("MK-05")
@pytest.mark.parametrize("chunks", [0, 3])
def test_die_after_chunks_ends_the_process_in_the_middle_of_an_answer(
    start: Callable[..., RunningWorker], chunks: int
) -> None:
    worker = start(decode_ms=2.0)
    client = Client(worker.url)
    client.fault(kind="die_after_chunks", chunks=chunks)
    try:
        received = read_stream(client, 50)
    except http.client.RemoteDisconnected:
        received = b""
    assert received.count(b"data: ") == chunks and b"[DONE]" not in received
    assert worker.wait(5.0) not in (None, 0)


@pytest.mark.covers("RT-14")
def test_corrupt_block_shows_in_the_answer_the_metrics_and_the_state(start: Callable[..., RunningWorker]) -> None:
    client = Client(start(prefill_tokens_per_s=1e6, decode_ms=0.5).url)
    prompt = list(range(70))
    right = client.complete(prompt=prompt, max_tokens=8).json()
    assert client.fault(kind="corrupt_block")["corrupted_blocks"] == 4
    wrong = client.complete(prompt=prompt, max_tokens=8).json()
    assert wrong["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert wrong["kvrelay_mock"]["wrong_reuse_blocks"] == 4
    assert wrong["choices"][0]["text"] != right["choices"][0]["text"]
    assert client.state()["wrong_reuse_blocks"] == 4
    assert b"\nkvrelay_mock_wrong_reuse_blocks_total 4\n" in client.get("/metrics").body
    stream = client.complete(prompt=prompt, max_tokens=2, stream=True).chunks()
    assert stream[-1]["kvrelay_mock"]["wrong_reuse_blocks"] == 4


def test_faults_can_be_on_from_the_start(start: Callable[..., RunningWorker]) -> None:
    client = Client(start(faults=({"kind": "503", "count": 1},)).url)
    assert [client.complete(prompt="x", max_tokens=1).status for _ in range(2)] == [503, 200]
