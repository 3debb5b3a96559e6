"""Wherever a worker lives: an IPv6 address, a name, a path of somebody else's server."""

from __future__ import annotations

import socket

import pytest

from kvrelay.edge.http.server import Exchange
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.direct import ask, assert_equal, both, get, post
from tests.edge.gateway.scripted import JSON, ScriptedWorker, running, until

COMPLETIONS = "/v1/completions"


def says_what_it_got(exchange: Exchange) -> None:
    host = exchange.header(b"host") or b""
    exchange.respond(200, (JSON, (b"x-host", host), (b"x-target", exchange.target.encode())), exchange.body)


class UnderAPath(ScriptedWorker):
    """Serves everything below /llm, as behind somebody's ingress."""

    def _handle(self, exchange: Exchange) -> None:
        assert exchange.path.startswith("/llm/"), exchange.path
        exchange.path = exchange.path.removeprefix("/llm")
        super()._handle(exchange)


@pytest.mark.parametrize("base", ["/llm", "/llm/", "/llm/v1", "/llm/v1/"])
@pytest.mark.parametrize("target", [COMPLETIONS, "/v1/a%2Fb/../c;d?x=1&y=%20&z", "/v1//x?", "/other"])
async def test_a_base_path_goes_before_every_path(base: str, target: str) -> None:
    worker = UnderAPath("a", says_what_it_got)
    await worker.start()
    workers = [{"name": "a", "url": worker.url + base, "adapter": "vllm"}]
    async with running(worker, workers=workers) as gateway:
        direct = await ask(worker.url, post(f"/llm{target}", {"prompt": [1]}))
        relayed = await ask(gateway.url, post(target, {"prompt": [1]}))
        assert_equal(direct, relayed)
        assert dict(relayed.headers)[b"x-target"] == f"/llm{target}".encode()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 loopback on this machine")
@pytest.mark.parametrize("shown", ["[::1]", "[0:0:0:0:0:0:0:1]"])
async def test_an_ipv6_worker(shown: str) -> None:
    with MockFleet([MockSpec(name="six", host="::1", prefill_tokens_per_s=1e6, decode_ms=0.5)]) as fleet:
        url = fleet.workers[0].url
        async with running(workers=[{"name": "six", "url": url.replace("[::1]", shown)}]) as gateway:
            await until(lambda: any(worker.routable for worker in gateway.status().workers))
            for request in (post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 3}), get("/v1/models")):
                assert_equal(*await both(url, gateway.url, request))
