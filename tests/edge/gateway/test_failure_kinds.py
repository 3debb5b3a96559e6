"""Every way in which a worker can fail a request: what its client sees, what the receipt says, what its health is then.

Each is played twice: with nobody else, and beside a worker that is well. Workers are bare sockets here, since half of
these things no HTTP server would do.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from msgspec import Struct

from kvrelay.core.model.units import Fault, Status
from kvrelay.edge.gateway.gateway import Gateway
from tests.edge.gateway.scripted import (
    METRICS,
    ScriptedWorker,
    chunk,
    gauges_are_zero,
    receipts,
    running,
    stream,
    token_body,
    until,
)

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TIMES = {"first_byte_s": 0.4, "idle_s": 0.4, "total_s": 30.0}


class BareWorker:
    """Says of itself what a vLLM server would; requests are answered by the script, byte by byte."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.asked = 0
        self._script = script
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for writer in tuple(self._open):
                writer.transport.abort()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while await self._answer(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or b"0"))
        path = head.split(b" ")[1]
        if path.startswith(b"/v1/completions"):
            self.asked += 1
            await self._script(reader, writer)
            return False
        answers = {b"/v1/models": b'{"data":[{"id":"m"}]}', b"/metrics": METRICS, b"/health": b""}
        status = b"200 OK" if path in answers else b"404 Not Found"
        writer.write(whole(status, answers.get(path, b"{}")))
        await writer.drain()
        return True


def whole(status: bytes, body: bytes, *lines: bytes) -> bytes:
    head = b"".join(line + b"\r\n" for line in (b"content-type: application/json", *lines))
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, head, len(body), body)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


BEGUN = STREAM_HEAD + framed(chunk("one")) + framed(chunk("two"))


def sends(data: bytes, then: Script) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        await then(reader, writer)

    return script


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """FIN both ways."""


async def half_closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """FIN, and it goes on listening."""
    writer.write_eof()
    await reader.read()


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """RST."""
    await asyncio.sleep(0.05)  # what was sent arrives first
    bare: socket.socket = writer.get_extra_info("socket")
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the other side has enough of it."""
    await reader.read()


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A token now and then, for ever."""
    while not writer.is_closing():
        writer.write(framed(chunk("x")))
        await writer.drain()
        await asyncio.sleep(0.05)


class Kind(Struct, frozen=True, kw_only=True):
    """One way to fail."""

    script: Script
    fault: Fault | None
    client: int | None  # status that the client gets from nobody but this worker; None: a stream that breaks
    status: Status
    reason: str
    standing: str  # after one such failure, with `health.failures = 1`
    retried: bool = True  # beside a worker that is well, the client gets that one's answer
    says: dict[str, str] = {}
    times: dict[str, float] = {}


def lost(script: Script, fault: Fault = Fault.RESET, **more: Any) -> Kind:
    """Before the client has anything."""
    given = {"client": 502, "status": Status.WORKER_LOST, "reason": "worker_lost", "standing": "suspended", **more}
    return Kind(script=script, fault=fault, **given)


def broken(script: Script, fault: Fault = Fault.RESET, **more: Any) -> Kind:
    """After it has got a part."""
    return lost(script, fault, **{"client": None, "retried": False, **more})


def answered(line: bytes, *lines: bytes, **more: Any) -> Kind:
    return Kind(script=sends(whole(line, b'{"mine": true}', *lines), closes), client=int(line[:3]), **more)


def refusal(line: bytes, *lines: bytes, **more: Any) -> Kind:
    given = {"status": Status.REFUSED, "reason": "back_pressure", "standing": "routable", **more}
    return answered(line, *lines, fault=Fault.BACK_PRESSURE, **given)


def own_error(status: bytes) -> Kind:
    return answered(status, fault=Fault.SERVER_ERROR, status=Status.ERROR, reason="server_error", standing="suspended")


def mistake(line: bytes) -> Kind:
    reason = "http_" + line[:3].decode()
    given = {"fault": None, "status": Status.CLIENT_ERROR, "reason": reason, "standing": "routable"}
    return answered(line, retried=False, **given)


TIMEOUT = {"client": 504, "status": Status.TIMEOUT}
KINDS = {
    "closed before a byte": lost(closes),
    "closed inside the head": lost(sends(STREAM_HEAD[:30], closes)),
    "closed after the head": lost(sends(STREAM_HEAD, closes)),
    "half-closed before a byte": lost(half_closes),
    "reset before a byte": lost(resets),
    "not HTTP": lost(sends(b"SSH-2.0-nonsense\r\n\r\n", hangs), Fault.GARBAGE),
    "silent": lost(hangs, Fault.FIRST_BYTE_TIMEOUT, reason="first_byte_timeout", **TIMEOUT),
    "silent after the head": lost(
        sends(STREAM_HEAD, hangs), Fault.FIRST_BYTE_TIMEOUT, reason="first_byte_timeout", **TIMEOUT
    ),
    "closed in the middle": broken(sends(BEGUN, closes)),
    "half-closed in the middle": broken(sends(BEGUN, half_closes)),
    "reset in the middle": broken(sends(BEGUN, resets)),
    "shorter than it said": broken(
        sends(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{}", closes)
    ),
    "broken framing": broken(sends(BEGUN + b"zz\r\nnot a chunk\r\n", hangs), Fault.GARBAGE),
    "silent in the middle": broken(
        sends(BEGUN, hangs), Fault.IDLE_TIMEOUT, status=Status.TIMEOUT, reason="idle_timeout"
    ),
    "without end": broken(
        sends(BEGUN, drips),
        Fault.TOTAL_TIMEOUT,
        status=Status.TIMEOUT,
        reason="total_timeout",
        standing="routable",
        times={"total_s": 0.6},
    ),
    "429": refusal(b"429 Too Many Requests"),
    "429 with a hint": refusal(b"429 Too Many Requests", b"retry-after: 7", says={"retry-after": "7"}),
    "503": refusal(b"503 Service Unavailable"),
    "500": own_error(b"500 Internal Server Error"),
    "502": own_error(b"502 Bad Gateway"),
    "504": own_error(b"504 Gateway Timeout"),
    "400": mistake(b"400 Bad Request"),
    "401": mistake(b"401 Unauthorized"),
    "404": mistake(b"404 Not Found"),
    "413": mistake(b"413 Content Too Large"),
    "422": mistake(b"422 Unprocessable Entity"),
}


@asynccontextmanager
async def gateway_before(
    kind: Kind, *others: ScriptedWorker, probe_failures: int = 1
) -> AsyncIterator[tuple[BareWorker, Gateway]]:
    worker = BareWorker("bad", kind.script)
    times = {f"gateway__timeouts__{name}": value for name, value in {**TIMES, **kind.times}.items()}
    flags = {"gateway__policy": "round_robin", "health__failures": probe_failures, **times}
    async with running(worker, *others, **flags) as gateway:  # type: ignore[arg-type]
        yield worker, gateway
        await until(lambda: gauges_are_zero(gateway))
        gateway.router.check()


async def post(gateway: Gateway) -> tuple[int, bytes, dict[str, str], bool]:
    """Status, body and headers that the client got, and whether it saw the answer as complete."""
    received = b""
    url, body = gateway.url + "/v1/completions", token_body(stream=True)
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        headers = {name.lower(): value for name, value in response.headers.items()}
        try:
            async for data in response.content.iter_any():
                received += data
        except aiohttp.ClientPayloadError:
            return response.status, received, headers, False
        return response.status, received, headers, True


def standing(gateway: Gateway, name: str = "bad") -> str:
    return next(worker.standing for worker in gateway.status().workers if worker.name == name)


@pytest.mark.covers("S24", "S25", "S28", "RC-11", "RC-13")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
async def test_alone(kind: Kind) -> None:
    async with gateway_before(kind) as (_, gateway):
        status, body, headers, complete = await post(gateway)
        assert standing(gateway) == kind.standing
        if kind.client is None:
            assert status == 200 and not complete and b"[DONE]" not in body
        else:
            assert (status, complete) == (kind.client, True)
            own = kind.fault in (None, Fault.BACK_PRESSURE, Fault.SERVER_ERROR)
            assert (body == b'{"mine": true}') == own, "the worker's own words where it had any"
        assert kind.says.items() <= headers.items()
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (kind.status, kind.reason)
        assert [attempt.fault for attempt in receipt.attempts] == [kind.fault]
        assert receipt.http_status in (kind.client, None)


@pytest.mark.covers("S24", "S25", "S26", "S27", "DR-02", "RC-11")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
async def test_beside_a_worker_that_is_well(kind: Kind) -> None:
    good = ScriptedWorker("good", stream)
    async with gateway_before(kind, good) as (bad, gateway):
        seen: list[tuple[int, bytes, dict[str, str], bool]] = []
        while not bad.asked:
            seen.append(await post(gateway))
        assert standing(gateway) == kind.standing and standing(gateway, "good") == "routable"
        status, body, _, complete = seen[-1]
        receipt = receipts(gateway)[0]
        if kind.retried:
            assert (status, complete) == (200, True) and body.endswith(b"[DONE]\n\n") and body.count(chunk("one")) == 1
            assert (receipt.status, receipt.chosen_worker) == (Status.OK, "good")
            assert [attempt.fault for attempt in receipt.attempts] == [kind.fault, None]
        else:
            assert (status, complete) == ((200, False) if kind.client is None else (kind.client, True))
            assert (receipt.status, receipt.failure_reason) == (kind.status, kind.reason)
            assert len(receipt.attempts) == 1 and len(good.requests) == len(seen) - 1, "nobody else was asked"


async def test_a_refused_connection() -> None:
    good = ScriptedWorker("good", stream)
    async with gateway_before(lost(hangs), good) as (bad, gateway):
        await bad.stop()
        answers = [await post(gateway) for _ in range(4)]
        assert [(status, complete) for status, _, _, complete in answers] == [(200, True)] * 4
        faults = _faults(gateway)
        assert set(faults) <= {None, Fault.CONNECT, Fault.RESET} and faults.count(Fault.CONNECT) <= 1
        await until(lambda: standing(gateway) == "dead")
        await good.stop()
        await until(lambda: standing(gateway, "good") == "dead")
        status, body, headers, _ = await post(gateway)
        assert status == 503 and b"no_worker_alive" in body and headers["retry-after"] == "1"


async def test_a_connection_that_does_not_come_about() -> None:
    """A listener whose queue is full drops what would connect, as a network that loses packets would."""
    good = ScriptedWorker("good", stream)
    kind = lost(hangs, times={"connect_s": 0.3})
    async with gateway_before(kind, good, probe_failures=100) as (bad, gateway):  # no probe finds out before
        await bad.stop()
        loop = asyncio.get_running_loop()
        with socket.socket() as full:
            full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            full.bind(("127.0.0.1", bad.port))
            full.listen(0)
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", bad.port))
            try:
                async with asyncio.timeout(20):
                    while Fault.CONNECT_TIMEOUT not in _faults(gateway):
                        began_s = loop.time()
                        assert (await post(gateway))[0] == 200
                assert loop.time() - began_s >= 0.3
                assert standing(gateway) in ("unreached", "dead")
                assert receipts(gateway)[0].chosen_worker == "good"
            finally:
                for filler in fillers:
                    filler.close()


def _faults(gateway: Gateway) -> list[Fault | None]:
    return [attempt.fault for receipt in receipts(gateway) for attempt in receipt.attempts]


@pytest.mark.covers("S26")
@pytest.mark.parametrize(
    "fails", [sends(whole(b"500 Internal Server Error", b"{}"), closes), hangs], ids=["500", "stuck"]
)
async def test_a_worker_that_recovers_comes_back_by_a_trial(fails: Script) -> None:
    """While it fails it gets one request at a time and seldom, although its probes are well all the time."""
    failing = True

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serves = sends(BEGUN + framed(b"data: [DONE]\n\n") + framed(b""), closes)
        await (fails if failing else serves)(reader, writer)

    good = ScriptedWorker("good", stream)
    async with gateway_before(lost(script), good) as (bad, gateway):
        began_s = asyncio.get_running_loop().time()
        for _ in range(60):
            assert (await post(gateway))[0] == 200
        for _ in range(10):
            assert {status for status, *_ in await asyncio.gather(*(post(gateway) for _ in range(6)))} == {200}
        suspensions = math.log2(asyncio.get_running_loop().time() - began_s + 1) + 2
        assert bad.asked <= suspensions
        assert next(worker.up for worker in gateway.status().workers if worker.name == "bad"), "its probes are well"
        failing = False
        async with asyncio.timeout(60):
            while standing(gateway) != "routable" or receipts(gateway)[0].chosen_worker != "bad":
                assert (await post(gateway))[0] == 200
                await asyncio.sleep(0.02)
