"""Large request bodies through the gateway: passed on while they come, once, and without desync whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvrelay.core.model.units import Fault, Status
from kvrelay.edge.gateway.forms import model_of_form
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.gateway.request import SENT_ONCE
from kvrelay.edge.http.heads import Header
from kvrelay.edge.http.server import Exchange
from tests.edge.gateway.direct import ask, post
from tests.edge.gateway.scripted import ScriptedWorker, gauges_are_zero, hang, receipts, running, until
from tests.edge.http.raw import connect

PATH = "/v1/audio/transcriptions"
FORM = ("Content-Type", "multipart/form-data; boundary=b")
HEAD = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
MIB = 2**20


def form(model: str, file_bytes: int) -> bytes:
    file = bytes(range(256)) * (file_bytes // 256)
    return (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n--b--\r\n'
        % (model.encode(), file)
    )


def chunked(body: bytes, trailers: bytes = b"") -> bytes:
    pieces = [body[i : i + 70_000] for i in range(0, len(body), 70_000)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailers + b"\r\n"


class Taking:
    """A script that takes uploads as they come and answers at their end."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.trailers: list[Sequence[Header]] = []
        self.begun = 0

    def __call__(self, exchange: Exchange) -> None:
        pieces: list[bytes] = []
        upload = exchange.upload
        if upload is None:
            self.bodies.append(exchange.body)
            exchange.respond(200, (), b"%d" % len(exchange.body))
            return
        self.begun += 1

        def end(trailers: Sequence[Header]) -> None:
            self.bodies.append(b"".join(pieces))
            self.trailers.append(trailers)
            exchange.respond(200, (), b"%d" % len(self.bodies[-1]))

        upload.on_data, upload.on_end = pieces.append, end
        upload.set_flow(True)


def port_of(gateway: Gateway) -> int:
    return int(gateway.url.rpartition(":")[2])


async def answered(reader: asyncio.StreamReader, end: bytes) -> bytes:
    async with asyncio.timeout(20):
        return await reader.readuntil(end)


@pytest.mark.covers("S20", "RC-11")
@pytest.mark.parametrize("framed", ["length", "chunked", "trailers"])
async def test_an_upload_arrives_as_it_was_sent_and_leaves_a_receipt(framed: str) -> None:
    taking = Taking()
    worker = ScriptedWorker("a", taking, holds_bytes=MIB)
    body = form("m", 3 * MIB)
    async with running(worker) as gateway:
        reader, writer = await connect(port_of(gateway))
        for _ in range(2):  # the client's connection is kept
            if framed == "length":
                writer.write(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            else:
                trailers = b"X-Sum: 1\r\nAuthorization: x\r\n" if framed == "trailers" else b""
                writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body, trailers))
            assert (await answered(reader, b"\r\n\r\n%d" % len(body))).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        assert taking.bodies == [body, body] and taking.begun == 2
        for seen in worker.requests:
            sent_in_chunks = framed != "length"
            assert (seen.header(b"transfer-encoding") is not None) is sent_in_chunks
            assert (seen.header(b"content-length") is None) is sent_in_chunks
        assert [list(each) for each in taking.trailers] == [[(b"X-Sum", b"1")] if framed == "trailers" else []] * 2
        for receipt in receipts(gateway):
            assert (receipt.status, receipt.unscored_because, receipt.model) == (Status.OK, "body_streamed", "m")
            assert len(receipt.attempts) == 1
        await until(lambda: gauges_are_zero(gateway))


@pytest.mark.parametrize("file_bytes", [1024, 2 * MIB])
async def test_a_form_goes_to_a_worker_of_the_model_that_it_names(file_bytes: int) -> None:
    workers = {name: ScriptedWorker(name, lambda e: e.respond(200, (), b"heard")) for name in ("llm", "whisper")}
    for worker in workers.values():
        await worker.start()
    served = [{"name": name, "url": w.url, "adapter": "vllm", "model": name} for name, w in workers.items()]
    async with running(*workers.values(), workers=served) as gateway:
        for _ in range(4):
            assert (await ask(gateway.url, post(PATH, form("whisper", file_bytes), FORM))).status == 200
        assert [len(worker.requests) for worker in workers.values()] == [0, 4]


def test_the_model_of_a_form() -> None:
    assert model_of_form(form("wh-1", 1024)) == "wh-1"
    typed = b'--b\r\ncontent-disposition: form-data; name="model"\r\nContent-Type: text/plain\r\n\r\nx y\r\n--b--'
    assert model_of_form(typed) == "x y"
    assert model_of_form(b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nmodel\r\n--b--') is None
    assert model_of_form(b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff\r\n--b--') is None
    assert model_of_form(b"") is None


async def test_json_is_read_whole_up_to_its_bound_and_passed_on_beyond() -> None:
    taking = Taking()
    worker = ScriptedWorker("a", taking, holds_bytes=MIB)
    limits = {"gateway__limits__body_bytes": MIB, "gateway__limits__streamed_body_bytes": 2 * MIB}
    async with running(worker, **limits) as gateway:
        for path in ("/v1/completions", "/v1/embeddings"):
            small = b'{"model":"m","prompt":[1,2],"x":"%b"}' % (b"y" * 500_000)
            large = b'{"model":"m","prompt":[1,2],"x":"%b"}' % (b"y" * 1_500_000)
            for body in (small, large):
                assert (await ask(gateway.url, post(path, body))).status == 200
                assert taking.bodies[-1] == body
            beyond = await ask(gateway.url, post(path, b" " * (2 * MIB + 1)))
            assert beyond.status == 413 and b"2097152" in beyond.body
        reasons = [receipt.unscored_because for receipt in receipts(gateway)]
        assert sorted(map(str, reasons)) == ["None", "body_streamed", "body_streamed", "path_not_scored"]


@pytest.mark.covers("S34")
async def test_a_body_that_a_tenants_salt_goes_into_is_never_passed_on_unread(tmp_path: Path) -> None:
    for name, text in (("keys", "ours\n"), ("salt", "grain\n")):
        (tmp_path / name).write_text(text)
    tenants = {"acme": {"api_keys_file": str(tmp_path / "keys"), "salt_file": str(tmp_path / "salt")}}
    taking = Taking()
    key = ("Authorization", "Bearer ours")
    async with running(ScriptedWorker("a", taking), tenants=tenants, gateway__limits__body_bytes=MIB) as gateway:
        body = b'{"model":"m","prompt":[1],"x":"%b"}' % (b"y" * 2 * MIB)
        for kind in ("application/json", "text/plain"):
            answer = await ask(gateway.url, post("/v1/completions", body, key, ("Content-Type", kind)))
            assert answer.status == 413
        assert taking.bodies == []
        assert (await ask(gateway.url, post(PATH, form("m", 2 * MIB), key, FORM))).status == 200


async def test_a_wrong_key_is_told_before_the_body_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ours\n")
    worker = ScriptedWorker("a")
    async with running(worker, tenants={"acme": {"api_keys_file": str(tmp_path / "keys")}}) as gateway:
        for credential, first in ((b"wrong", b"HTTP/1.1 401"), (b"ours", b"HTTP/1.1 100 Continue")):
            reader, writer = await connect(port_of(gateway))
            head = b"Authorization: Bearer %b\r\nExpect: 100-continue\r\nContent-Length: 5000000\r\n\r\n" % credential
            writer.write(HEAD + head)
            assert (await answered(reader, b"\r\n\r\n")).startswith(first)
            writer.close()
        assert worker.requests == []
        await until(lambda: len(receipts(gateway)) == 1)  # who was told to go on and left
        assert receipts(gateway)[0].status is Status.CLIENT_CANCELLED
        await until(lambda: gauges_are_zero(gateway))


# --- what fails ------------------------------------------------------------------------------------------------------


async def test_a_worker_that_cannot_be_reached_is_replaced_as_nothing_was_sent() -> None:
    taking = Taking()
    workers = ScriptedWorker("a"), ScriptedWorker("b", taking, holds_bytes=MIB)
    async with running(*workers, gateway__policy="round_robin", health__interval_s=3600) as gateway:
        await workers[0].stop()
        body = form("m", 2 * MIB)
        for _ in range(2):
            assert (await ask(gateway.url, post(PATH, body, FORM))).status == 200
        assert taking.bodies == [body, body]
        attempts = [[attempt.fault for attempt in receipt.attempts] for receipt in receipts(gateway)]
        assert [Fault.CONNECT, None] in attempts
        await until(lambda: gauges_are_zero(gateway))


def _dies(exchange: Exchange) -> None:
    assert exchange.upload is not None
    exchange.upload.on_data = lambda data: exchange.abort()
    exchange.upload.set_flow(True)


def _answers_early(status: int) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.respond(status, ((b"retry-after", b"3"),), b"enough")


@pytest.mark.covers("RC-13")
@pytest.mark.parametrize(
    ("script", "status", "fault", "reason"),
    [
        (_dies, 502, Fault.RESET, "worker_lost"),
        (_answers_early(500), 500, Fault.SERVER_ERROR, "server_error"),
        (_answers_early(503), 503, Fault.BACK_PRESSURE, "back_pressure"),
        (_answers_early(413), 413, None, "http_413"),
        (_answers_early(401), 401, None, "http_401"),
        (hang, 504, Fault.IDLE_TIMEOUT, "idle_timeout"),
    ],
    ids=["dies", "500", "503", "413", "401", "reads nothing"],
)
async def test_an_upload_that_fails_is_not_sent_a_second_time(
    script: Callable[[Exchange], None], status: int, fault: Fault | None, reason: str
) -> None:
    """The client is still sending when the answer comes, and sends on: nothing of that is taken for a request."""
    workers = [ScriptedWorker(name, script, holds_bytes=1000) for name in "ab"]
    async with running(*workers, gateway__timeouts__idle_s=0.5) as gateway:
        reader, writer = await connect(port_of(gateway))
        smuggled = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        piece = smuggled * (MIB // len(smuggled))
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (40 * len(piece)))
        async with asyncio.timeout(30):
            try:
                for _ in range(39):
                    writer.write(piece)
                    await writer.drain()
            except ConnectionError:
                pass
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 %d" % status) and answer.count(b"HTTP/1.1") == 1, answer[:500]
        assert fault is not None or answer.endswith(b"enough")
        writer.close()
        assert sum(len(worker.requests) for worker in workers) == 1
        (receipt,) = receipts(gateway)
        (attempt,) = receipt.attempts
        assert (attempt.fault, receipt.failure_reason, receipt.http_status) == (fault, reason, status)
        assert fault is None or SENT_ONCE in (attempt.detail or "")
        assert receipt.not_retried_because == (None if fault is None else "body_streamed")
        await until(lambda: gauges_are_zero(gateway))


async def test_a_worker_that_answers_and_hangs_up_at_once_does_not_confuse_the_next_request() -> None:
    """It closes with unread input, so its answer may be lost on its way: then the client is told that the worker is."""

    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 6\r\nconnection: close\r\n\r\nenough")
        writer.close()

    worker = ScriptedWorker("a")
    async with running(worker, health__interval_s=3600) as gateway:
        await worker.stop()
        server = await asyncio.start_server(rude, "127.0.0.1", worker.port)
        answer = await ask(gateway.url, post(PATH, form("m", 8 * MIB), FORM))
        assert answer.status in (413, 502)
        (receipt,) = receipts(gateway)
        assert receipt.http_status == answer.status
        server.close()
        await server.wait_closed()


@pytest.mark.covers("S01", "S02")
@pytest.mark.parametrize("sent", [0, 1000, 2 * MIB])
async def test_a_client_that_leaves_in_mid_upload_is_followed_to_the_worker(sent: int) -> None:
    worker = ScriptedWorker("a", Taking(), holds_bytes=1000)
    async with running(worker) as gateway:
        _, writer = await connect(port_of(gateway))
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (4 * MIB) + b"x" * sent)
        await until(lambda: gateway.host.requests if sent < MIB else worker.requests)
        writer.close()
        await until(lambda: receipts(gateway))
        await until(lambda: len(worker.left) == len(worker.requests) == (sent > MIB))
        (receipt,) = receipts(gateway)
        assert receipt.status is Status.CLIENT_CANCELLED
        assert all(worker.up for worker in gateway.status().workers)
        await until(lambda: gauges_are_zero(gateway))


async def test_a_body_that_goes_wrong_is_the_clients_fault_and_ends_at_the_worker() -> None:
    worker = ScriptedWorker("a", Taking(), holds_bytes=1000)
    async with running(worker) as gateway:
        reader, writer = await connect(port_of(gateway))
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b"x" * 2 * MIB)[:-5])
        await until(lambda: worker.requests)
        writer.write(b"no chunk\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        await until(lambda: worker.left)
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.http_status) == (Status.CLIENT_ERROR, 400)
        assert receipt.failure_reason is not None and receipt.failure_reason.startswith("malformed request")
        assert all(worker.up for worker in gateway.status().workers)
        await until(lambda: gauges_are_zero(gateway))


@pytest.mark.parametrize("sent", [1000, 2 * MIB])
async def test_the_total_time_ends_an_upload(sent: int) -> None:
    worker = ScriptedWorker("a", Taking(), holds_bytes=1000)
    async with running(worker, gateway__timeouts__total_s=0.5) as gateway:
        reader, writer = await connect(port_of(gateway))
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (4 * MIB) + b"x" * sent)
        assert (await answered(reader, b"\r\n\r\n")).startswith(b"HTTP/1.1 504")
        writer.close()
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (Status.TIMEOUT, "total_timeout")
        await until(lambda: gauges_are_zero(gateway))
