"""A worker whose every word is scripted by the test: HTTP paths, event messages and replay, on free loopback ports.

It is written from the wire format alone and shares no code with the mock worker.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

_starts = itertools.count(1_700_000_000)


def stored(hashes: list[int], tokens: list[int], *, parent: int | None = None, block_size: int = 4) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def payload(*events: object, dp_rank: int = 0, published_s: float = 1.5) -> bytes:
    return msgspec.msgpack.encode([published_s, list(events), dp_rank])


class ScriptedWorker:
    """`async with` starts it; `restart()` is a new process at the same addresses."""

    def __init__(self, *, events: bool = True, start_time: bool = True) -> None:
        self.events = events
        self.start_time = start_time
        self.start_s = next(_starts)
        self.health = 200
        self.in_use = False  # blocks: then nothing is reset
        self.asked: list[str] = []
        self.authorization: list[str | None] = []
        self.metrics_lines: list[str] = []
        self.buffer: list[tuple[int, bytes]] = []
        self.answer_replay: Callable[[int], list[list[bytes]]] = self._buffered
        self.port = 0
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for socket in (self._publisher, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
        self.events_port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._replay.bind_to_random_port("tcp://127.0.0.1")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ScriptedWorker:
        await self.listen()
        self._replaying = asyncio.create_task(self._serve_replay())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        await self.stop_listening()
        self._context.destroy(linger=0)

    async def listen(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/reset_prefix_cache", self._reset)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop_listening(self) -> None:
        await self._runner.cleanup()

    def become_new_process(self) -> None:
        self.start_s = next(_starts)
        self.buffer.clear()

    async def publish(self, seq: int, data: bytes, *, topic: bytes = b"kv@a@m") -> None:
        self.buffer.append((seq, data))
        await self._publisher.send_multipart([topic, seq.to_bytes(8, "big"), data])

    async def publish_raw(self, frames: list[bytes]) -> None:
        await self._publisher.send_multipart(frames)

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        self.authorization.append(request.headers.get("authorization"))
        match request.path:
            case "/health":
                return web.Response(status=self.health)
            case "/v1/models":
                return web.json_response({"object": "list", "data": [{"id": "m", "parent": None, "root": "m"}]})
            case "/version":
                return web.json_response({"version": "0.32.0"})
            case "/metrics":
                return web.Response(text=self._metrics_page())
            case "/kv_event_sources" if self.events:
                return web.json_response({"0": self._source()})
        return web.Response(status=404)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"count": 2, "max_model_len": 10, "tokens": [len(body["prompt"]), 70_000]})

    async def _reset(self, request: web.Request) -> web.Response:
        return web.json_response({"success": not self.in_use})

    def _source(self) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
            "topic": "kv@a",
        }

    def _metrics_page(self) -> str:
        lines = ['vllm:cache_config_info{block_size="4",engine="0",num_gpu_blocks="40"} 1.0', *self.metrics_lines]
        if self.start_time:
            lines.append(f"process_start_time_seconds {self.start_s}")
        return "\n".join(lines) + "\n"

    async def _serve_replay(self) -> None:
        while True:
            identity, *frames = await self._replay.recv_multipart()
            if len(frames) != 2 or frames[0] != b"":
                continue
            for answer in self.answer_replay(int.from_bytes(frames[1], "big")):
                await self._replay.send_multipart([identity, *answer])

    def _buffered(self, from_seq: int) -> list[list[bytes]]:
        kept = [[b"", b"kv@a@m", seq.to_bytes(8, "big"), data] for seq, data in self.buffer if seq >= from_seq]
        return [*kept, [b"", b"", b"\xff" * 8, b""]]
