"""TLS on both sides: who is believed, what is said of who is not, and that nothing else changes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from kvrelay.core.model.units import Fault, Status
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.http.server import Exchange
from tests.edge.gateway.scripted import (
    ANSWER,
    ScriptedWorker,
    client_of,
    gauges_are_zero,
    receipts,
    running,
    token_body,
    until,
)

HOST = "127.0.0.1"
MIB = 2**20


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    return file


def serves(authority: trustme.CA, host: str = HOST) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(context)
    return context


@asynccontextmanager
async def before(worker: ScriptedWorker, **keys: object) -> AsyncIterator[Gateway]:
    """A gateway before a worker that has these keys in its table; probed once, and then not any more."""
    await worker.start()
    workers = [{"name": "a", "url": worker.url, "adapter": "vllm", **keys}]
    async with running(worker, workers=workers, health__interval_s=3600) as gateway:
        yield gateway


@pytest.mark.parametrize("verified", [True, False])
async def test_requests_probes_metrics_and_tokenization_go_over_tls(
    authority: trustme.CA, ca_file: Path, verified: bool
) -> None:
    worker = ScriptedWorker("a", tls=serves(authority))
    keys: dict[str, object] = {"ca_file": str(ca_file)} if verified else {"tls_verify": False}
    async with before(worker, **keys) as gateway, client_of(gateway) as client:
        for _ in range(2):
            assert (await client.post(token_body()))[:2] == (200, ANSWER)
        assert (await client.post({"model": "m", "prompt": "some text"}))[0] == 200
        assert len(worker.tokenized) == 1
        spec = gateway.fleet.view("a").spec
        assert spec is not None and spec.block_size_tokens == 16  # as its metrics page says
        assert [receipt.status for receipt in receipts(gateway)] == [Status.OK] * 3
        await until(lambda: gauges_are_zero(gateway))


@pytest.mark.parametrize(
    ("presents", "said"),
    [
        (lambda ours: serves(trustme.CA()), "certificate is not accepted: "),
        (lambda ours: serves(ours, "elsewhere.test"), "certificate is not accepted: IP address mismatch"),
        (lambda ours: None, "does not speak TLS"),
    ],
    ids=["another authority", "another host", "no TLS"],
)
async def test_a_worker_that_is_not_who_it_should_be_gets_nothing_and_the_receipt_says_why(
    authority: trustme.CA, ca_file: Path, presents: object, said: str
) -> None:
    assert callable(presents)
    worker = ScriptedWorker("a", tls=serves(authority))
    async with before(worker, ca_file=str(ca_file)) as gateway, client_of(gateway) as client:
        await worker.stop()
        worker.tls = presents(authority)
        await worker.start()
        status, _, _ = await client.post(token_body())
        assert status == 502 and worker.requests == []
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.failure_reason) == (Status.WORKER_LOST, "worker_tls")
        assert receipt.attempts[0].fault is Fault.TLS and said in (receipt.attempts[0].detail or "")
        assert not gateway.status().workers[0].up
        await client.admin("POST", "/admin/workers", {"url": worker.url.replace("http:", "https:") + "/b", "name": "b"})
        if worker.tls is not None:  # of one that never answered, the probe's complaint
            await until(lambda: "certificate is not accepted" in gateway.fleet.view("b").last_probe_detail)
        else:
            await until(lambda: "does not speak TLS" in gateway.fleet.view("b").last_probe_detail)


async def test_the_systems_authorities_are_asked_without_a_file(authority: trustme.CA) -> None:
    worker = ScriptedWorker("a", tls=serves(authority))
    async with running() as gateway, client_of(gateway) as client:
        await worker.start()
        await client.admin("POST", "/admin/workers", {"url": worker.url, "name": "a"})
        await until(lambda: "certificate is not accepted" in gateway.fleet.view("a").last_probe_detail)
        assert (await client.post(token_body()))[0] == 503
        await worker.stop()


@pytest.mark.parametrize(("text", "error"), [(None, FileNotFoundError), ("no certificate", ValueError)])
async def test_a_ca_file_that_is_none_stops_the_start_and_is_named(
    tmp_path: Path, text: str | None, error: type[Exception]
) -> None:
    file = tmp_path / "authorities.pem"
    if text is not None:
        file.write_text(text)
    workers = [{"name": "a", "url": "https://127.0.0.1:9", "ca_file": str(file)}]
    with pytest.raises(error, match=r"authorities\.pem"):
        async with running(workers=workers):
            pass


@asynccontextmanager
async def encrypted(authority: trustme.CA, folder: Path, worker: ScriptedWorker) -> AsyncIterator[Gateway]:
    certificate = authority.issue_cert(HOST)
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    files = {"gateway__tls_cert": str(folder / "cert.pem"), "gateway__tls_key": str(folder / "key.pem")}
    async with running(worker, **files) as gateway:
        yield gateway


def _refuses_at_once(exchange: Exchange) -> None:
    exchange.respond(413, (), b"too large")


def _takes(exchange: Exchange) -> None:
    upload = exchange.upload
    assert upload is not None
    taken: list[int] = []
    upload.on_data = lambda data: taken.append(len(data))
    upload.on_end = lambda trailers: exchange.respond(200, (), b"%d" % sum(taken))
    upload.set_flow(True)


@pytest.mark.parametrize(("script", "told"), [(_takes, b"8388608"), (_refuses_at_once, b"too large")])
async def test_a_large_upload_over_tls_and_an_answer_in_the_middle_of_it(
    authority: trustme.CA, tmp_path: Path, script: object, told: bytes
) -> None:
    """TLS cannot end one direction only, so the connection stays until the client has seen the answer."""
    assert callable(script)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    worker = ScriptedWorker("a", script, holds_bytes=1000)
    async with encrypted(authority, tmp_path, worker) as gateway:
        assert gateway.url.startswith("https://")
        port = int(gateway.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(HOST, port, ssl=trusting)
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (8 * MIB))
        async with asyncio.timeout(20):
            for _ in range(8):
                writer.write(b"x" * MIB)
                await writer.drain()
            assert told in await reader.readuntil(told)
        writer.close()
        await until(lambda: gauges_are_zero(gateway))
