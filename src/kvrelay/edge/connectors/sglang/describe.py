"""What an SGLang server says of itself: models, page size, event sources, and which life of the process this is."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from kvrelay.core.model.events import WorkerSpec
from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import Description, EventSource, WorkerAnswerUnusable
from kvrelay.edge.connectors.openai import Models
from kvrelay.edge.connectors.vllm.describe import binds_by_vllms_rule, reachable
from kvrelay.edge.system.unreadable import UNREADABLE
from kvrelay.edge.system.urls import join_url


class _Publisher(Struct):
    """`kv_events` of /server_info: the publisher as routers may dial it."""

    endpoint_host: str
    endpoint_port_base: int
    topic: str = ""
    block_size: int | None = None
    replay_endpoint_port_base: int | None = None


class _Flag(Struct):
    """The value of --kv-events-config."""

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""


class ServerInfo(Struct):
    version: str | None = None
    page_size: int | None = None
    dp_size: int = 1
    random_seed: int | None = None
    startup_time: Any = None
    kv_events_config: str | None = None
    kv_events: _Publisher | None = None


async def describe(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], *, engine: str) -> Description:
    """Raises WorkerUnreachable or WorkerAnswerUnusable. Only the list of models is indispensable."""
    models = await ask.get_json(session, join_url(url, "/v1/models"), headers, Models)
    info = await server_info(session, url, headers)
    sources = _sources(info, urlsplit(url).hostname or "")
    published = info.kv_events.block_size if info.kv_events is not None else None
    spec = WorkerSpec(
        url=url,
        models=models.bases,
        adapters=models.adapters,
        block_size_tokens=published or info.page_size,
        ranks=max(1, info.dp_size),
        sends_events=bool(sources),
        engine=engine,
    )
    return Description(spec=spec, sources=sources, incarnation=_life(info), version=info.version)


async def server_info(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> ServerInfo:
    """Empty where the server has neither the path nor its former name."""
    for path in ("/server_info", "/get_server_info"):
        answer = await ask.get(session, join_url(url, path), headers)
        if answer.status == 200:
            return ask.as_json(answer, path, ServerInfo)
    return ServerInfo()


def _life(info: ServerInfo) -> str | None:
    if info.startup_time is None:
        return None
    measured = msgspec.json.encode((info.startup_time, info.random_seed), order="sorted")
    return blake2b(measured, digest_size=8).hexdigest()


def _sources(info: ServerInfo, host: str) -> tuple[EventSource, ...]:
    flag = _flag(info)
    if flag is None or flag.publisher != "zmq":
        return ()
    return tuple(
        EventSource(
            rank=rank,
            endpoint=reachable(_of_rank(flag.endpoint, rank), host),
            replay=reachable(_of_rank(flag.replay_endpoint, rank), host) if flag.replay_endpoint else None,
            topic=flag.topic,
            bind=not (binds_by_vllms_rule(flag.endpoint) or "0.0.0.0" in flag.endpoint),
        )
        for rank in range(max(1, info.dp_size))
    )


def _flag(info: ServerInfo) -> _Flag | None:
    """The flag knows the replay endpoint in every release; `kv_events` is there even where the flag is not shown."""
    if info.kv_events_config:
        try:
            return msgspec.json.decode(info.kv_events_config, type=_Flag)
        except UNREADABLE as error:
            raise WorkerAnswerUnusable(f"/server_info has an unreadable kv_events_config: {error}") from error
    if info.kv_events is None:
        return None
    stated = info.kv_events
    replay = stated.replay_endpoint_port_base
    return _Flag(
        publisher="zmq",
        endpoint=f"tcp://{stated.endpoint_host}:{stated.endpoint_port_base}",
        replay_endpoint=None if replay is None else f"tcp://*:{replay}",
        topic=stated.topic,
    )


def _of_rank(endpoint: str, rank: int) -> str:
    """Each rank has a port of its own, counted up from the one that was stated."""
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if rank and endpoint.startswith("tcp://") and port.isdigit() else endpoint
