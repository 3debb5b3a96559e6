"""HTTP clients with habits of their own: httpx, and curl as people call it. aiohttp and Node: see the parent folder."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvrelay.core.model.units import Status
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.worker.launch import RunningWorker
from tests.edge.gateway.clients.seen import SAME_ID, same_through, same_through_async
from tests.edge.gateway.direct import masked
from tests.edge.gateway.scripted import receipts, until

PROMPT = {"prompt": list(range(300, 420)), "max_tokens": 6}
CHAT = {"messages": [{"role": "user", "content": "Grüß Gott"}], "stream": True}
FILE = bytes(range(256)) * 2000


def _noted(response: httpx.Response) -> list[Any]:
    names = ("content-type", "content-length", "transfer-encoding", "x-kvrelay-mock")
    return [response.status_code, *(response.headers.get(name) for name in names), masked(response.content)]


async def test_httpx(worker: RunningWorker, gateway: Gateway) -> None:
    def led(url: str) -> Any:
        with httpx.Client(base_url=url, headers=SAME_ID, timeout=20.0) as client:
            return [
                _noted(client.post("/v1/completions", json=PROMPT)),
                _noted(client.post("/v1/chat/completions", json=CHAT)),
                _noted(client.post("/v1/completions", content=iter([b'{"prompt":', b"[1,2],", b'"max_tokens":3}']))),
                _noted(client.post("/v1/audio/transcriptions", files={"file": ("a.wav", FILE)}, data={"x": "1"})),
                _noted(client.request("OPTIONS", "/v1/completions")),
                _noted(client.head("/v1/models")),
                _noted(client.get("/v1/models", params={"a": "b c&d"})),
                _noted(client.delete("/v1/nothing")),
            ]

    said = await same_through(worker, gateway, led)
    assert [status for status, *_ in said] == [200, 200, 400, 200, 405, 405, 200, 404]


async def test_httpx_async_line_by_line_and_leaving_half_way(worker: RunningWorker, gateway: Gateway) -> None:
    async def led(url: str) -> Any:
        async with httpx.AsyncClient(base_url=url, headers=SAME_ID, timeout=20.0) as client:
            return await asyncio.gather(*(_lines(client, path) for path in ("/v1/completions",) * 4))

    await same_through_async(worker, gateway, led)

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        body = {**PROMPT, "stream": True, "max_tokens": 20_000}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                assert line.startswith("data: ")
                break
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
    await until(lambda: len(receipts(gateway)) == 6)
    statuses = [receipt.status for receipt in receipts(gateway)]
    assert statuses.count(Status.CLIENT_CANCELLED) == 1 and statuses.count(Status.OK) == 5


async def _lines(client: httpx.AsyncClient, path: str) -> list[str]:
    """The texts only: which of several equal requests finds the others' blocks is their race."""
    async with client.stream("POST", path, json={**PROMPT, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    return [msgspec.json.decode(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]


CURL: dict[str, tuple[str, ...]] = {
    "a body": ("-d", msgspec.json.encode(PROMPT).decode(), "-H", "content-type: application/json"),
    "a stream": ("-N", "-d", msgspec.json.encode(CHAT).decode(), "-H", "content-type: application/json"),
    "a chunked body": (
        *("-d", msgspec.json.encode(PROMPT).decode(), "-H", "transfer-encoding: chunked"),
        *("-H", "content-type: application/json"),
    ),
    "an expectation": (
        *("-d", msgspec.json.encode(PROMPT).decode(), "-H", "expect: 100-continue"),
        *("-H", "content-type: application/json"),
    ),
    "HTTP/1.0": ("--http1.0", "-d", msgspec.json.encode(PROMPT).decode(), "-H", "content-type: application/json"),
    "an upgrade to HTTP/2": ("--http2", "-d", msgspec.json.encode(PROMPT).decode(), "-H", "content-type: text/x"),
    "no body": ("-X", "POST"),
    "a head": ("--head",),
}
PATHS = {"a stream": "/v1/chat/completions", "a head": "/v1/models"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize("case", CURL)
async def test_curl(worker: RunningWorker, gateway: Gateway, case: str) -> None:
    def led(url: str) -> Any:
        return _curl(url + PATHS.get(case, "/v1/completions"), *CURL[case])

    code, body = await same_through(worker, gateway, led)
    assert code == {"an upgrade to HTTP/2": 400, "no body": 400, "a head": 405}.get(case, 200)
    assert body or case == "a head"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
async def test_curl_uploads_a_file(worker: RunningWorker, gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(FILE)

    def led(url: str) -> Any:
        return _curl(f"{url}/v1/audio/transcriptions", "-F", f"file=@{file}", "-F", "language=de")

    code, body = await same_through(worker, gateway, led)
    assert code == 200 and msgspec.json.decode(body)["text"].startswith(f"a.wav: {len(FILE)} bytes")


def _curl(url: str, *flags: str) -> tuple[int, bytes]:
    done = subprocess.run(
        ("curl", "-sS", "-o", "-", "-w", "%{stderr}%{http_code}", "-H", "x-request-id: same", *flags, url),
        capture_output=True,
        timeout=30,
        check=True,
    )
    return int(done.stderr), b"" if "--head" in flags else masked(done.stdout)
