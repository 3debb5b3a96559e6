"""What one request and one streamed chunk cost in the gateway, in CPU time of its own process pinned to one core.

The whole gateway runs: receipts, metrics, health probes, deadlines. Generator and fixed-answer workers are on the other
core. Beside a CPU figure stands what a bare byte relay (no HTTP, no routing, one upstream connection per client) costs
in its place in the same run: it is the floor on this machine at this hour. Beside a rate stands the rate of the same
generator straight at a worker: it must be well above, else the rig was the limit.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import uvloop

from bench.figure import Figure
from bench.rig.load import Load, drive, post
from bench.rig.processes import Pinned, cores, pinned

CONNECTIONS = 32
WARM_UP, REQUESTS = 1_000, 10_000
STREAMS, STREAM_CHUNKS, CHUNK_MS = 64, 400, 4.0
PROMPT_TOKENS = 190  # about 1 KB of JSON
PATH = "/v1/completions"
BARE = ["-m", "bench.rig.bare_relay"]


def run() -> list[Figure]:
    gateway_core, other_core = cores()
    kept = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {other_core})
    try:
        return _requests(gateway_core, other_core) + _chunks(gateway_core, other_core)
    finally:
        os.sched_setaffinity(0, kept)


def _requests(gateway_core: int, other_core: int) -> list[Figure]:
    """round_robin on plain text, which it neither tokenizes nor hashes; cache_load on token ids, hashed and matched."""
    figures = []
    for policy, limit_us, kind, payloads in (
        ("round_robin", 70.0, ["--plain"], _texts),
        ("cache_load", 130.0, [], completions),
    ):
        with pinned([*upstream_arguments(CHUNK_MS), *kind], core=other_core) as workers:
            straight = drive_all(workers.ready[0], payloads(REQUESTS))
            with pinned([*BARE, workers.ready[0]], core=gateway_core) as bare:
                drive_all(bare.ready["url"], payloads(WARM_UP))
                bare_s, _ = _measured(bare, payloads(REQUESTS), CONNECTIONS)
            with pinned(serve_arguments(workers.ready, policy), core=gateway_core) as gateway:
                wait_routable(gateway.ready["admin_url"], len(workers.ready))
                drive_all(gateway.ready["url"], payloads(WARM_UP))
                cpu_s, load = _measured(gateway, payloads(REQUESTS), CONNECTIONS)
                figures += _request_figures(policy, limit_us, cpu_s, bare_s, load, straight, gateway.rss_mb())
    return figures


def _request_figures(
    policy: str, limit_us: float, cpu_s: float, bare_s: float, load: Load, straight: Load, rss_mb: float
) -> list[Figure]:
    name = f"gateway CPU per 1 KB request, {policy}, {CONNECTIONS} connections"
    return [
        Figure(name, cpu_s / load.requests * 1e6, "us", limit_us, bare_s / load.requests * 1e6, "bare byte relay"),
        Figure(
            f"  requests per second, {policy}",
            load.requests / load.wall_s,
            "1/s",
            None,
            straight.requests / straight.wall_s,
            "without gateway",
        ),
        Figure(f"  resident memory, {policy}", rss_mb, "MB"),
    ]


def _chunks(gateway_core: int, other_core: int) -> list[Figure]:
    """As fast as it goes, which has the limit, and at the pace of a model, where each chunk wakes the gateway up."""
    figures = []
    for pace, chunk_ms, limit_us in (("as fast as it goes", 0.0, 8.0), (f"every {CHUNK_MS:g} ms", CHUNK_MS, None)):
        with pinned(upstream_arguments(chunk_ms), core=other_core) as workers:
            straight = drive_all(workers.ready[0], _streams(STREAMS), connections=STREAMS)
            with pinned([*BARE, workers.ready[0]], core=gateway_core) as bare:
                bare_s, bare_load = _measured(bare, _streams(STREAMS * 2), STREAMS)
            with pinned(serve_arguments(workers.ready, "round_robin"), core=gateway_core) as gateway:
                wait_routable(gateway.ready["admin_url"], len(workers.ready))
                drive_all(gateway.ready["url"], _streams(STREAMS), connections=STREAMS)
                cpu_s, load = _measured(gateway, _streams(STREAMS * 2), STREAMS)
        assert load.chunks == STREAMS * 2 * STREAM_CHUNKS, load
        name, bare_us = f"gateway CPU per SSE chunk, {pace}", bare_s / bare_load.chunks * 1e6
        figures += [
            Figure(name, cpu_s / load.chunks * 1e6, "us", limit_us, bare_us, "bare byte relay"),
            Figure(
                "  chunks per second",
                load.chunks / load.wall_s,
                "1/s",
                None,
                straight.chunks / straight.wall_s,
                "without gateway",
            ),
        ]
    return figures


def upstream_arguments(chunk_ms: float) -> list[str]:
    return ["-m", "bench.rig.upstream", "--stream-chunks", str(STREAM_CHUNKS), "--chunk-ms", str(chunk_ms)]


def _measured(gateway: Pinned, payloads: Iterator[bytes], connections: int) -> tuple[float, Load]:
    began = gateway.cpu_s()
    load = drive_all(gateway.ready["url"], payloads, connections=connections)
    return gateway.cpu_s() - began, load


def drive_all(url: str, payloads: Iterator[bytes], connections: int = CONNECTIONS) -> Load:
    """Every payload once, over so many connections."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(drive(url, payloads, connections=connections))


def completions(count: int) -> Iterator[bytes]:
    """Sessions that grow from shared heads, so that cache_load finds partial matches."""
    chance = random.Random(11)
    heads = [[chance.randrange(100_000) for _ in range(PROMPT_TOKENS // 2)] for _ in range(64)]
    for number in range(count):
        tail = [chance.randrange(100_000) for _ in range(PROMPT_TOKENS - PROMPT_TOKENS // 2)]
        prompt = heads[number % len(heads)] + tail
        yield post(PATH, json.dumps({"model": "m", "prompt": prompt, "max_tokens": 20}, separators=(",", ":")).encode())


def _texts(count: int) -> Iterator[bytes]:
    """1 KB of plain text: no worker of the plain kind can match it, so nothing is hashed."""
    for number in range(count):
        body = {"model": "m", "prompt": f"{number:06d} " + "word " * 190, "max_tokens": 20}
        yield post(PATH, json.dumps(body, separators=(",", ":")).encode())


def _streams(count: int) -> Iterator[bytes]:
    body = json.dumps({"model": "m", "prompt": list(range(64)), "stream": True}, separators=(",", ":")).encode()
    return iter([post(PATH, body)] * count)


def serve_arguments(worker_urls: Sequence[str], policy: str) -> list[str]:
    arguments = ["-m", "kvrelay.cli.main", "serve", "--policy", policy, "--port", "0", "--admin-port", "0", "--json"]
    for url in worker_urls:
        arguments += ["--worker", url]
    return arguments


def wait_routable(admin_url: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if sum(worker["routable"] for worker in get_json(f"{admin_url}/admin/workers")["workers"]) == count:
            return
        time.sleep(0.1)
    raise TimeoutError("the gateway does not see its workers")


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


if __name__ == "__main__":
    for figure in run():
        limit = "" if figure.limit is None else f"  limit {figure.limit:g}"
        ceiling = "" if figure.ceiling is None else f"  {figure.ceiling_name}: {figure.ceiling:.1f}"
        print(f"{figure.name}: {figure.value:.1f} {figure.unit}{limit}{ceiling}")
