"""What mock workers do not do: compression, odd answers to odd methods, keys. Equal on both ways."""

from __future__ import annotations

import gzip
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvrelay.core.model.units import Status
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.http.server import Exchange
from tests.edge.gateway.direct import ask, assert_equal, both, get, post
from tests.edge.gateway.scripted import ANSWER, EVENT_STREAM, JSON, ScriptedWorker, chunk, receipts, running, until

STREAM = chunk("one") + chunk("two") + b"data: [DONE]\n\n"
COMPLETIONS = "/v1/completions"


def accepts_gzip(exchange: Exchange) -> bool:
    return b"gzip" in (exchange.header(b"accept-encoding") or b"")


def compresses(exchange: Exchange) -> None:
    streams = b'"stream":true' in exchange.body.replace(b" ", b"")
    kind, body = (EVENT_STREAM, STREAM) if streams else (JSON, ANSWER)
    headers = [kind, (b"Vary", b"Accept-Encoding")]
    if accepts_gzip(exchange):
        headers.append((b"Content-Encoding", b"gzip"))
        body = gzip.compress(body, mtime=0)
    if not streams:
        exchange.respond(200, headers, body)
        return
    exchange.start(200, headers)
    for start in range(0, len(body), 11):
        exchange.write(body[start : start + 11])
    exchange.finish()


HOPS = (b"connection", b"keep-alive", b"te", b"upgrade", b"proxy-connection", b"x-hop", b"http2-settings")
MINE = ((b"Connection", b"keep-alive, X-Mine"), (b"X-Mine", b"1"), (b"Keep-Alive", b"timeout=9"), (b"X-Kept", b"\xe9"))


def hop_by_hop(exchange: Exchange) -> None:
    """Says what it got from its neighbour, and sends what is for its neighbour only."""
    seen = [b"%b=%b" % (name, exchange.header(name) or b"") for name in HOPS if exchange.header(name) is not None]
    exchange.respond(200, (JSON, *MINE), b'{"seen":"%b"}' % b",".join(seen))


@pytest.mark.covers("S29")
@pytest.mark.parametrize("encoding", [(), (("accept-encoding", "gzip, deflate"),), (("accept-encoding", "identity"),)])
@pytest.mark.parametrize("streams", [True, False])
async def test_a_worker_that_compresses(streams: bool, encoding: tuple[tuple[str, str], ...]) -> None:
    worker = ScriptedWorker("a", compresses)
    async with running(worker) as gateway:
        request = post(COMPLETIONS, {"prompt": [1, 2], "stream": streams}, *encoding)
        for _ in range(2):
            direct, relayed = await both(worker.url, gateway.url, request)
            assert_equal(direct, relayed)
            assert direct.framed_by_length is not streams
        async with aiohttp.ClientSession(auto_decompress=True) as session:
            bodies = []
            for url in (worker.url, gateway.url):
                async with session.post(url + COMPLETIONS, json={"prompt": [1, 2], "stream": streams}) as response:
                    bodies.append(await response.read())
        assert bodies[0] == bodies[1] == (STREAM if streams else ANSWER)


@pytest.mark.covers("S29")
async def test_a_compressed_request_arrives_as_it_was_sent() -> None:
    worker = ScriptedWorker("a", lambda e: e.respond(200, (JSON,), b'{"n":%d}' % len(e.body)))
    async with running(worker) as gateway:
        body = gzip.compress(b'{"prompt":[1,2,3],"stream":true}')
        direct, relayed = await both(worker.url, gateway.url, post(COMPLETIONS, body, ("content-encoding", "gzip")))
        assert_equal(direct, relayed)
        assert worker.requests[0].body == worker.requests[1].body == body
        assert receipts(gateway)[0].unscored_because == "compressed_body"


@pytest.mark.covers("S29")
@pytest.mark.parametrize(
    ("te", "seen"), [("gzip", b""), ("gzip;q=0.5, Trailers", b"connection=te,te=trailers")], ids=["coding", "trailers"]
)
async def test_headers_between_neighbours_end_here_both_ways(te: str, seen: bytes) -> None:
    """`te: trailers` is asked anew of the worker, as we pass trailers on; codings are between neighbours."""
    worker = ScriptedWorker("a", hop_by_hop)
    async with running(worker) as gateway:
        hops = (
            ("Connection", "keep-alive, x-hop, te"),
            ("X-Hop", "1"),
            ("TE", te),
            ("Keep-Alive", "timeout=5"),
        )
        answer = await ask(gateway.url, post(COMPLETIONS, {"prompt": [1]}, *hops))
        assert answer.body == b'{"seen":"%b"}' % seen
        names = {name.lower() for name, _ in answer.headers}
        assert b"x-kept" in names and not names & {b"x-mine", b"keep-alive", b"connection"}


@pytest.mark.parametrize(
    "script",
    [
        lambda e: e.respond(200, (JSON,), ANSWER),
        lambda e: e.respond(200, (JSON,), b""),
        lambda e: e.respond(204, (), b""),
        lambda e: e.respond(304, ((b"etag", b'"x"'),), b""),
        lambda e: e.respond(404, (JSON,), b'{"error":"no"}'),
        lambda e: e.respond(307, ((b"location", b"/elsewhere"),), b"moved"),
        lambda e: e.respond(503, (JSON, (b"retry-after", b"3")), b'{"error":"busy"}'),
        lambda e: e.respond(500, (JSON, (b"x-why", b"1"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")), b"{}"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE", "PATCH"])
async def test_every_method_and_kind_of_answer(script: Callable[[Exchange], None], method: str) -> None:
    worker = ScriptedWorker("a", script)
    async with running(worker) as gateway:
        direct, relayed = await both(worker.url, gateway.url, get("/v1/any/thing?x=1", method=method))
        assert_equal(direct, relayed)


@pytest.mark.covers("S20")
@pytest.mark.parametrize(("file_bytes", "because"), [(2**19, "body_not_json"), (2**20, "body_streamed")])
async def test_a_form_with_a_file_arrives_byte_for_byte(file_bytes: int, because: str) -> None:
    worker = ScriptedWorker("a", lambda e: e.respond(200, (), e.body))
    async with running(worker) as gateway:
        file = bytes(range(256)) * (file_bytes // 256)
        body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n--b--\r\n' % file
        request = post("/v1/audio/transcriptions", body, ("Content-Type", "multipart/form-data; boundary=b"))
        direct, relayed = await both(worker.url, gateway.url, request)
        assert_equal(direct, relayed)
        assert relayed.body == body
        assert [seen.header(b"content-type") for seen in worker.requests] == [b"multipart/form-data; boundary=b"] * 2
        assert receipts(gateway)[0].unscored_because == because


# --- keys ------------------------------------------------------------------------------------------------------------

RIGHT, WRONG = "Bearer the-workers-key", "Bearer somebody-elses"


class KeyedWorker(ScriptedWorker):
    """Wants a key on every path, as the engine does with `--api-key`."""

    def _handle(self, exchange: Exchange) -> None:
        if exchange.header(b"authorization") != RIGHT.encode():
            exchange.respond(401, (JSON, (b"www-authenticate", b"Bearer")), b'{"error":"Unauthorized"}')
        else:
            super()._handle(exchange)


@asynccontextmanager
async def keyed(folder: Path, **flags: object) -> AsyncIterator[tuple[KeyedWorker, Gateway]]:
    file = folder / "worker-key"
    file.write_text(RIGHT.removeprefix("Bearer ") + "\n")
    worker = KeyedWorker("a")
    await worker.start()
    workers = [{"name": "a", "url": worker.url, "adapter": "vllm", "api_key_file": str(file)}]
    async with running(worker, workers=workers, **flags) as gateway:
        yield worker, gateway


@pytest.mark.covers("S31")
@pytest.mark.parametrize("prompt", [[1, 2, 3], "some text"])
async def test_a_client_is_let_in_by_its_own_key_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prompt: object
) -> None:
    caplog.set_level(logging.DEBUG)
    log = tmp_path / "receipts.jsonl"
    async with keyed(tmp_path, receipts__path=str(log)) as (worker, gateway):
        for credential, status in ((RIGHT, 200), (WRONG, 401), (None, 401), (RIGHT, 200)):
            headers = () if credential is None else (("Authorization", credential),)
            for streams in (False, True):
                request = post(COMPLETIONS, {"prompt": prompt, "stream": streams}, *headers)
                direct, relayed = await both(worker.url, gateway.url, request)
                assert_equal(direct, relayed)
                assert relayed.status == status
        assert [receipt.status for receipt in receipts(gateway)].count(Status.CLIENT_ERROR) == 4
        assert all(worker.up and worker.routable for worker in gateway.status().workers)
        assert bool(worker.tokenized) is isinstance(prompt, str)
        async with aiohttp.ClientSession(gateway.admin_url) as session:
            pages = [
                await (await session.get(path)).text()
                for path in ("/metrics", "/admin/status", "/admin/workers", "/admin/receipts")
            ]
    for written in (caplog.text, log.read_text(), *pages):
        assert RIGHT.split()[1] not in written and WRONG.split()[1] not in written


@pytest.mark.covers("S31")
async def test_a_gateway_with_keys_of_its_own_uses_the_workers_key_for_its_tenants(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ours\n")
    async with keyed(tmp_path, tenants={"acme": {"api_keys_file": str(keys)}}) as (worker, gateway):
        request = post(COMPLETIONS, {"prompt": [1]}, ("Authorization", "Bearer ours"))
        assert (await ask(gateway.url, request)).status == 200
        assert (await ask(gateway.url, post(COMPLETIONS, {"prompt": [1]}, ("Authorization", RIGHT)))).status == 401
        assert len(worker.requests) == 1


async def test_a_worker_whose_key_nobody_gave_us_is_not_routed_to() -> None:
    worker = KeyedWorker("a")
    other = ScriptedWorker("b")
    async with running(other) as gateway:
        await worker.start()
        async with aiohttp.ClientSession(gateway.admin_url) as session:
            await session.post("/admin/workers", json={"url": worker.url, "name": "a"})
        await until(lambda: len(gateway.fleet.views()) == 2)
        for _ in range(4):
            assert (await ask(gateway.url, post(COMPLETIONS, {"prompt": [1]}))).status == 200
        assert worker.requests == []
        await worker.stop()


async def test_a_compressed_body_cannot_get_a_tenants_salt_and_does_not_pass_without(tmp_path: Path) -> None:
    salt = tmp_path / "salt"
    salt.write_text("pepper\n")
    worker = ScriptedWorker("a")
    async with running(worker, tenants={"default": {"salt_file": str(salt)}}) as gateway:
        plain, compressed = b'{"prompt":[1,2,3]}', gzip.compress(b'{"prompt":[1,2,3]}')
        for encoding, body, status in (("gzip", compressed, 415), ("identity", plain, 200)):
            request = post(COMPLETIONS, body, ("content-encoding", encoding))
            assert (await ask(gateway.url, request)).status == status
        assert [b'"pepper"' in seen.body for seen in worker.requests] == [True]
