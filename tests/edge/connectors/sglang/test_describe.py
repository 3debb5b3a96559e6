"""What SGLang servers of several releases say of themselves, laid out as their sources do."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from kvrelay.edge.connectors.base import Description, EventSource, WorkerAnswerUnusable
from kvrelay.edge.connectors.registry import CONNECTORS
from tests.edge.connectors.serving import Answered, serving

MODELS = Answered(
    '{"object": "list", "data": [{"id": "m", "owned_by": "sglang", "root": "m", "parent": null},'
    ' {"id": "ad1", "owned_by": "sglang", "root": "/adapters/ad1", "parent": "m"}]}'
)


async def described(info: dict[str, Any], path: str = "/server_info") -> Description:
    pages = {"GET /v1/models": MODELS, f"GET {path}": Answered(msgspec.json.encode(info))}
    async with serving(pages) as url, aiohttp.ClientSession() as session:
        return await CONNECTORS["sglang"].describe(session, url, {})


def flag(**changes: Any) -> str:
    return msgspec.json.encode({"publisher": "zmq", "endpoint": "tcp://*:5557", **changes}).decode()


@pytest.mark.covers("TP-02", "S11")
async def test_every_rank_has_ports_of_its_own() -> None:
    info = {"page_size": 1, "dp_size": 2, "kv_events_config": flag(replay_endpoint="tcp://127.0.0.1:6000", topic="kv")}
    found = await described(info)
    assert found.sources == (
        EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:6000", "kv"),
        EventSource(1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:6001", "kv"),
    )
    assert (found.spec.ranks, found.spec.block_size_tokens, found.spec.adapters) == (2, 1, ("ad1",))


@pytest.mark.covers("TP-02")
@pytest.mark.parametrize(
    ("endpoint", "seen", "bind"),
    [
        ("tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557", False),
        ("tcp://router:5557", "tcp://router:5557", True),
        ("ipc:///run/kv", "ipc:///run/kv", False),
    ],
)
async def test_who_listens_follows_from_the_endpoints_text(endpoint: str, seen: str, bind: bool) -> None:
    (source,) = (await described({"page_size": 64, "kv_events_config": flag(endpoint=endpoint)})).sources
    assert (source.endpoint, source.bind, source.replay) == (seen, bind, None)


@pytest.mark.covers("TP-02")
async def test_the_former_path_without_the_routers_entry_is_enough() -> None:
    info = {"version": "0.5.2", "page_size": 64, "kv_events_config": flag(), "model_path": "/models/m"}
    found = await described(info, "/get_server_info")
    assert (found.version, found.spec.block_size_tokens, len(found.sources)) == ("0.5.2", 64, 1)
    assert found.incarnation is None  # nothing in it tells one life from the next


@pytest.mark.covers("TP-02")
async def test_the_routers_entry_is_enough_where_the_flag_is_not_shown() -> None:
    entry = {"endpoint_host": "*", "endpoint_port_base": 5557, "replay_endpoint_port_base": 5559, "block_size": 128}
    found = await described({"page_size": 64, "kv_events": entry})
    assert found.sources == (EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559"),)
    assert found.spec.block_size_tokens == 128  # pages of decode-context-parallel ranks are published joined


@pytest.mark.parametrize("config", [None, "", flag(publisher="null")])
async def test_without_a_publisher_there_are_no_events(config: str | None) -> None:
    found = await described({"page_size": 64, "kv_events_config": config, "kv_events": None})
    assert (found.sources, found.spec.sends_events) == ((), False)


async def test_a_flag_that_cannot_be_read_says_so() -> None:
    with pytest.raises(WorkerAnswerUnusable, match="unreadable kv_events_config"):
        await described({"page_size": 64, "kv_events_config": "{publisher: zmq}"})


async def test_a_server_with_models_only_is_described_as_far_as_it_says() -> None:
    async with serving({"GET /v1/models": MODELS}) as url, aiohttp.ClientSession() as session:
        found = await CONNECTORS["sglang"].describe(session, url, {})
    assert (found.version, found.incarnation, found.spec.block_size_tokens, found.sources) == (None, None, None, ())
