"""Workers whose every answer the test decides, and a gateway in front of them; all in this process, on free ports."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.http.limits import HttpLimits
from kvrelay.edge.http.server import Exchange, HttpServer, start_server
from kvrelay.edge.system.config import load_config

JSON = (b"content-type", b"application/json")
EVENT_STREAM = (b"content-type", b"text/event-stream")
BLOCK_SIZE = 16
METRICS = b'vllm:cache_config_info{block_size="16"} 1.0\nvllm:num_requests_running{model_name="m"} 0.0\n'
USAGE = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
ANSWER = msgspec.json.encode({"id": "a", "choices": [{"text": "hi"}], "usage": USAGE})


def chunk(text: str) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"index": 0, "text": text}]}) + b"\n\n"


def answer(exchange: Exchange) -> None:
    exchange.respond(200, (JSON,), ANSWER)


def stream(exchange: Exchange) -> None:
    exchange.start(200, (EVENT_STREAM,))
    for text in ("one", "two"):
        exchange.write(chunk(text))
    exchange.write(b"data: " + msgspec.json.encode({"choices": [], "usage": USAGE}) + b"\n\ndata: [DONE]\n\n")
    exchange.finish()


def breaks(*data: bytes) -> Callable[[Exchange], None]:
    """Streams so much, then its connection breaks."""

    def script(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        for each in data:
            exchange.write(each)
        asyncio.get_running_loop().call_later(0.02, exchange.abort)

    return script


def streams(*data: bytes) -> Callable[[Exchange], None]:
    """A whole stream."""

    def script(exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        for each in data:
            exchange.write(each)
        exchange.finish()

    return script


def hang(exchange: Exchange) -> None:
    """No answer, ever."""


class ScriptedWorker:
    """Looks like a vLLM server without events. `script` answers everything but the paths that describe it."""

    def __init__(
        self,
        name: str,
        script: Callable[[Exchange], None] = answer,
        *,
        holds_bytes: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`holds_bytes`: the script gets a longer body as an `upload`."""
        self.tls = tls
        self.name = name
        self._holds_bytes = holds_bytes
        self.script = script
        self.requests: list[Exchange] = []
        self.left: list[Exchange] = []
        self.tokenized: list[dict[str, Any]] = []
        self.healthy = True
        self.port = 0
        self._server: HttpServer | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        if self._server is not None:
            return
        self._server = await start_server(
            self._handle,
            host="127.0.0.1",
            port=self.port,
            limits=HttpLimits(streamed_body_bytes=2**30),
            held_at_most=lambda path, headers: self._holds_bytes,
            ssl=self.tls,
        )
        self.port = self._server.port

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    def _handle(self, exchange: Exchange) -> None:
        match exchange.path:
            case "/v1/models":
                exchange.respond(200, (JSON,), b'{"object":"list","data":[{"id":"m","object":"model"}]}')
            case "/metrics":
                exchange.respond(200, (), METRICS)
            case "/health":
                exchange.respond(200 if self.healthy else 503, (), b"")
            case "/kv_event_sources" | "/version":
                exchange.respond(404, (JSON,), b"{}")
            case "/tokenize":
                self.tokenized.append(msgspec.json.decode(exchange.body))
                exchange.respond(200, (JSON,), msgspec.json.encode({"tokens": list(range(40))}))
            case _:
                self.requests.append(exchange)
                exchange.on_gone = lambda: self.left.append(exchange)
                self.script(exchange)


@asynccontextmanager
async def running(*workers: ScriptedWorker, **flags: object) -> AsyncIterator[Gateway]:
    """A gateway that sees all the workers as routable. Flags are configuration keys with `__` for dots."""
    for worker in workers:
        await worker.start()
    settings: dict[str, object] = {
        "workers": [{"name": worker.name, "url": worker.url, "adapter": "vllm"} for worker in workers],
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "health.interval_s": 0.1,
    }
    settings.update({name.replace("__", "."): value for name, value in flags.items()})
    try:
        async with Gateway(load_config(Path("/dev/null"), {}, settings), seed=1, key_seed=b"test") as gateway:
            await until(lambda: sum(worker.routable for worker in gateway.status().workers) == len(workers))
            yield gateway
    finally:
        for worker in workers:
            await worker.stop()


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  what tests wait for is seldom an event of theirs
            await asyncio.sleep(0.005)


def token_body(tokens: int = 40, **members: object) -> dict[str, object]:
    return {"model": "m", "prompt": list(range(100, 100 + tokens)), "max_tokens": 2, **members}


class Client:
    """A client of the gateway that notes what it got."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self._gateway = gateway
        self._session = session

    async def post(
        self, body: dict[str, object], path: str = "/v1/completions", **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post(self._gateway.url + path, json=body, headers=named) as response:
            lowered = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.read(), lowered

    async def admin(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        data = None if body is None else msgspec.json.encode(body)
        async with self._session.request(
            method, self._gateway.admin_url + path, data=data, headers=headers
        ) as response:
            raw = await response.read()
            return response.status, msgspec.json.decode(raw) if "json" in response.content_type else raw.decode()


@asynccontextmanager
async def client_of(gateway: Gateway) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(gateway, session)


def receipts(gateway: Gateway) -> list[Receipt]:
    return gateway.receipts.recent(1000)


def gauges_are_zero(gateway: Gateway) -> bool:
    targets = [target for worker in gateway.status().workers for target in worker.targets]
    booked = ("active_requests", "active_prefill_tokens", "active_decode_blocks")
    values = [getattr(target, name) for target in targets for name in booked]
    assert min(values) >= 0
    return not any(values) and not gateway.host.requests and gateway.describe()["open_upstream_calls"] == 0
