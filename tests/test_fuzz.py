"""A short run of the fuzz with fixed seeds, and the proof that it finds what it is there for."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from bench.fuzz import admin as admin_cases
from bench.fuzz import answers, connection, requests, rig
from bench.fuzz.finding import chance_of
from bench.fuzz.run import PARTS, run_part
from bench.fuzz.strict import NotHttp, read_answers, read_request

from kvrelay.edge.connectors import usage
from kvrelay.edge.gateway import admin, heads
from kvrelay.edge.http.server import ServerConnection

CASES = {"requests": 240, "answers": 96, "admin": 480}


@pytest.mark.parametrize("part", PARTS)
async def test_nothing_is_found(part: str) -> None:
    outcome = await run_part(part, seed=20, numbers=range(CASES[part]), seconds=60)
    assert outcome.findings == [] and outcome.cases == CASES[part]


def _answers_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerConnection, "_queue", ServerConnection._begin)


def _lets_lengths_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_NOT_FORWARDED", heads._NOT_FORWARDED - {b"content-length"})


def _knows_no_depth_in_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "UNREADABLE", msgspec.DecodeError)


def _knows_no_depth_in_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "UNREADABLE", msgspec.DecodeError)


@pytest.mark.parametrize(
    ("part", "harm"),
    [
        ("requests", _answers_as_they_come),
        ("requests", _lets_lengths_pass),
        ("answers", _knows_no_depth_in_answers),
        ("admin", _knows_no_depth_in_orders),
    ],
)
async def test_a_gateway_that_was_harmed_is_found_out(
    monkeypatch: pytest.MonkeyPatch, part: str, harm: Callable[[pytest.MonkeyPatch], None]
) -> None:
    for module in (connection, requests, answers, admin_cases):
        monkeypatch.setattr(module, "HANG_S", 1.0)  # what hangs is found out as well, and need not be waited for
    monkeypatch.setattr(rig, "QUIET_S", 1.0)
    harm(monkeypatch)
    outcome = await run_part(part, seed=20, numbers=range(3000), seconds=40, most_findings=1)
    assert outcome.findings


def test_a_case_is_the_same_every_time() -> None:
    for part in ("requests", "answers"):
        first, second = (PARTS[part](chance_of(7, part, 11), 11) for _ in range(2))
        assert first.raw == second.raw != PARTS[part](chance_of(7, part, 12), 12).raw


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


def test_the_judge_reads_what_is_right() -> None:
    chunked = b"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0A\r\n0123456789\r\n0\r\nx-t: 1\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nx-method: HEAD\r\ncontent-length: 9\r\n\r\n"
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    read, rest = read_answers(ANSWER + interim + chunked + head + ANSWER[:-1])
    assert [answer.body for answer in read] == [b"hi", b"a0123456789", b""] and rest == ANSWER[:-1]
    request = read_request(b"POST /x?y HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nab")
    assert request is not None and (request.start, request.body) == ((b"POST", b"/x?y"), b"a")


@pytest.mark.parametrize(
    "wrong",
    [
        ANSWER.replace(b"\r\n", b"\n"),
        ANSWER.replace(b"HTTP/1.1", b"HTTP/1.0"),
        ANSWER.replace(b": 2", b": +2"),
        ANSWER.replace(b"length: ", b"length : "),
        ANSWER.replace(b"content-length: 2", b"x: y"),
        ANSWER.replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n"),
        ANSWER.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n"),
        ANSWER.replace(b"\r\n\r\n", b"\r\n folded\r\n\r\n"),
        ANSWER.replace(b"OK", b"O\0K"),
        ANSWER + b"surplus\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;x\r\na\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nhost: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nno trailer\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: y\n\r\n",
    ],
)
def test_the_judge_forgives_nothing(wrong: bytes) -> None:
    with pytest.raises(NotHttp):
        read_answers(wrong + b"\r\n\r\n")
