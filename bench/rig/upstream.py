"""A worker that computes nothing: fixed answers over our own HTTP server, several workers in one light process.

    python -m bench.rig.upstream --workers 4      prints one JSON list of URLs, runs until its input closes

It looks like a vLLM server without events to the gateway, so prompts are scored against an approximate index.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import uvloop

from kvrelay.edge.http.server import Exchange, start_server

BLOCK_SIZE_TOKENS = 16
JSON = (b"content-type", b"application/json")
EVENT_STREAM = (b"content-type", b"text/event-stream")
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
METRICS = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="%d",num_gpu_blocks="10000"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 0.0
""" % (BLOCK_SIZE_TOKENS,)
ANSWER = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": " word" * 20, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 200, "completion_tokens": 20},  # it caches nothing and claims nothing about it
    }
).encode()
CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","model":"m","choices":[{"index":0,"text":" word"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class FixedWorker:
    """`stream_chunks` chunks, one every `chunk_ms`, for bodies that ask for a stream."""

    def __init__(self, stream_chunks: int, chunk_ms: float, *, plain: bool) -> None:
        self._plain = plain
        self._stream_chunks = stream_chunks
        self._chunk_s = chunk_ms / 1000
        self._loop = asyncio.get_running_loop()

    def handle(self, exchange: Exchange) -> None:
        match exchange.path:
            case "/v1/completions" if b'"stream":true' in exchange.body:
                exchange.start(200, (EVENT_STREAM,))
                self._stream(exchange, self._stream_chunks)
            case "/v1/completions":
                exchange.respond(200, (JSON,), ANSWER)
            case "/v1/models":
                exchange.respond(200, (JSON,), MODELS)
            case "/metrics" if not self._plain:
                exchange.respond(200, ((b"content-type", b"text/plain"),), METRICS)
            case "/health":
                exchange.respond(200, (), b"")
            case _:
                exchange.respond(404, (JSON,), b"{}")

    def _stream(self, exchange: Exchange, left: int) -> None:
        if exchange.gone:
            return
        if left == 0:
            exchange.write(DONE)
            exchange.finish()
            return
        exchange.write(CHUNK)
        self._loop.call_later(self._chunk_s, self._stream, exchange, left - 1)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--stream-chunks", type=int, default=400)
    parser.add_argument("--chunk-ms", type=float, default=4.0)
    parser.add_argument("--plain", action="store_true", help="OpenAI paths only: no metrics, no block size")
    options = parser.parse_args()
    worker = FixedWorker(options.stream_chunks, options.chunk_ms, plain=options.plain)
    servers = [await start_server(worker.handle, host="127.0.0.1", port=0) for _ in range(options.workers)]
    sys.stdout.write(json.dumps([f"http://127.0.0.1:{server.port}" for server in servers]) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for server in servers:
        await server.close()


if __name__ == "__main__":
    uvloop.run(main())
