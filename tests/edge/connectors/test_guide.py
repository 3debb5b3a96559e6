"""The example of docs/guide/write-a-connector.md, run as it stands there."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from kvrelay.core.model.prompt import Usage
from kvrelay.core.model.units import IndexState
from kvrelay.edge.connectors.base import Connector, EventSource, MalformedEvents, ReportedLoad, Scrape
from kvrelay.edge.connectors.metrics_page import CANONICAL
from kvrelay.edge.connectors.registry import CONNECTORS
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.system.config import load_config
from tests.conformance.connectors import test_connectors as suite
from tests.conformance.connectors.doubles import Described, Double
from tests.edge.connectors.serving import Answered, serving
from tests.edge.gateway.scripted import receipts, until

GUIDE = Path(__file__).parents[3] / "docs/guide/write-a-connector.md"
BLOCK = 4
MODELS = Answered('{"object": "list", "data": [{"id": "m", "owned_by": "toy"}]}')
BODY = b'{"text": "hi", "counts": {"prompt": 92, "generated": 4, "reused": 64}}'
STREAM = b'data: {"text": "hi"}\n\ndata: {"counts": {"prompt": 92, "generated": 4, "reused": 64}}\n\n'
EVENT = b'{"at": 1.5, "stored": [[[18446744073709551614, 7], null, [10, 11, 12, 130000]]]}'


def info(boot: int, events: str | None = "tcp://127.0.0.1:5557") -> Answered:
    return Answered(msgspec.json.encode({"block": BLOCK, "boot": boot, "version": "1.0", "events": events}))


def metrics(boot: int) -> Answered:
    return Answered(f"toy:busy 3\ntoy:boot {boot}\n")


DOUBLE = Double(
    pages={
        "GET /v1/models": MODELS,
        "GET /info": info(1),
        "GET /health": Answered(),
        "GET /metrics": metrics(1),
        "POST /v1/completions": Answered(BODY, headers={"content-type": "application/json"}),
    },
    another_life={"GET /info": info(2), "GET /metrics": metrics(2)},
    described=Described(("m",), BLOCK, "1.0", (EventSource(0, "tcp://127.0.0.1:5557"),)),
    tells_lives=True,
    unhealthy={"GET /health": Answered(status=503)},
    scrape=Scrape({0: ReportedLoad(running_requests=3)}, process_start_s=1.0),
    unavailable=tuple(name for name in CANONICAL if name not in ("running_requests", "process_start_s")),
    body=BODY,
    stream=STREAM,
    usage=Usage(92, 4, 64),
    event=EVENT,
)
CASES = [
    pytest.param(test, garbage, id=f"{name}-{number}" if garbage else name)
    for name, test in inspect.getmembers(suite, inspect.isfunction)
    if name.startswith("test_") and "connector" in inspect.signature(test).parameters
    for number, garbage in enumerate(
        next((mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"), [{}])
        if hasattr(test, "pytestmark")
        else [{}]
    )
]


def code() -> str:
    found = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connector]:
    module = types.ModuleType("toy_of_the_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # its structs look their own types up there
    exec(compile(code(), str(GUIDE), "exec"), module.__dict__)
    connector: Connector = module.ToyConnector()
    monkeypatch.setitem(CONNECTORS, "toy", connector)
    yield connector


def test_it_is_as_short_as_promised() -> None:
    lines = [line for line in code().splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 60
    assert max(map(len, code().splitlines())) <= 120


@pytest.mark.parametrize(("test", "given"), CASES)
async def test_it_passes_what_all_connectors_pass(toy: Connector, test, given) -> None:
    wanted = inspect.signature(test).parameters
    known = {"name": "toy", "connector": toy, "double": DOUBLE, "payload": given, "garbage": given}
    outcome = test(**{name: known[name] for name in wanted})
    if inspect.isawaitable(outcome):
        await outcome


@pytest.mark.parametrize("stored", [[[[], None, [1]]], [[[1], None, [-1]]], [[[1], None, [2**32]]], [7]])
def test_what_its_wire_cannot_mean_is_malformed(toy: Connector, stored: object) -> None:
    with pytest.raises(MalformedEvents):
        toy.decode_events(msgspec.json.encode({"at": 1.0, "stored": stored}))


async def test_a_gateway_routes_by_what_the_toy_worker_says(toy: Connector, tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    publisher.setsockopt(zmq.LINGER, 0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    pages = {**DOUBLE.pages, "GET /info": info(1, f"tcp://127.0.0.1:{port}")}
    prompt = list(range(10, 22))
    try:
        async with serving(pages) as url:
            flags = {"workers": [{"name": "a", "url": url}], "gateway.port": 0, "gateway.admin_port": 0}
            config = load_config(Path("/dev/null"), {}, {**flags, "health.interval_s": 0.1})
            async with Gateway(config, seed=1, key_seed=b"test") as gateway, aiohttp.ClientSession() as session:
                await until(lambda: any(worker.routable for worker in gateway.status().workers))
                assert gateway.fleet.view("a").engine == "toy"
                target = gateway.status().workers[0].targets[0]
                seq = 0
                while not target.index_blocks.get("gpu"):  # until it is subscribed
                    batch = {"at": 1.5 + seq, "stored": [[[7], None, prompt[:4]], [[8], 7, prompt[4:8]]]}
                    await publisher.send_multipart([b"", seq.to_bytes(8, "big"), msgspec.json.encode(batch)])
                    seq += 1
                    await asyncio.sleep(0.02)
                    target = gateway.status().workers[0].targets[0]
                body = {"model": "m", "prompt": prompt}
                async with session.post(f"{gateway.url}/v1/completions", json=body) as response:
                    assert await response.read() == BODY
                await until(lambda: receipts(gateway))
                receipt = receipts(gateway)[0]
        assert (receipt.matched_tokens_at_route, receipt.actual_cached_tokens) == (8, 64)
        assert receipt.index_state in (IndexState.LIVE, IndexState.INCOMPLETE)
    finally:
        context.destroy(linger=0)
