"""What a vLLM server says of itself: models, block size, event sources, and which life of the process this is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import aiohttp
from msgspec import Struct

from kvrelay.core.model.events import WorkerSpec
from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import Description, EventSource, WorkerAnswerUnusable
from kvrelay.edge.connectors.metrics_page import Page
from kvrelay.edge.connectors.openai import Models
from kvrelay.edge.connectors.vllm import metrics_map
from kvrelay.edge.system.urls import join_url

_ANY_HOST = {"*", "0.0.0.0", "::", "[::]"}


class _Source(Struct):
    """The publisher's configuration of one data-parallel rank."""

    enable_kv_cache_events: bool = True
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None


class _Version(Struct):
    version: str | None = None


async def describe(
    session: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    *,
    engine: str,
    worker_binds: Callable[[str], bool],
) -> Description:
    """Raises WorkerUnreachable or WorkerAnswerUnusable. Only the list of models is indispensable.

    `worker_binds` says of an endpoint's text whether the worker listens there (else it connects, and we listen).
    """
    models = await ask.get_json(session, join_url(url, "/v1/models"), headers, Models)
    page = await _metrics_page(session, url, headers)
    sources = await _sources(session, url, headers, worker_binds)
    spec = WorkerSpec(
        url=url,
        models=models.bases,
        adapters=models.adapters,
        block_size_tokens=metrics_map.cache_block_size_tokens(page),
        ranks=max((source.rank + 1 for source in sources), default=1),
        sends_events=bool(sources),
        engine=engine,
    )
    started_s = metrics_map.scrape(page).process_start_s
    return Description(
        spec=spec,
        sources=sources,
        incarnation=None if started_s is None else f"{started_s:.2f}",
        process_start_s=started_s,
        version=await _version(session, url, headers),
    )


async def _metrics_page(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Page:
    answer = await ask.get(session, join_url(url, "/metrics"), headers)
    return metrics_map.MAP.read(answer.body.decode("utf-8", "replace") if answer.status == 200 else "")


async def _sources(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], worker_binds: Callable[[str], bool]
) -> tuple[EventSource, ...]:
    try:
        found = await ask.get_json(session, join_url(url, "/kv_event_sources"), headers, dict[int, _Source | None])
    except WorkerAnswerUnusable:
        return ()  # releases before this path, or events switched off
    host = urlsplit(url).hostname or ""
    return tuple(
        EventSource(
            rank=rank,
            endpoint=reachable(source.endpoint, host),
            replay=reachable(source.replay_endpoint, host) if source.replay_endpoint else None,
            topic=source.topic or "",
            bind=not worker_binds(source.endpoint),
        )
        for rank, source in sorted(found.items())
        if source is not None and source.enable_kv_cache_events and source.endpoint
    )


async def _version(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> str | None:
    try:
        return (await ask.get_json(session, join_url(url, "/version"), headers, _Version)).version
    except WorkerAnswerUnusable:
        return None


def binds_by_vllms_rule(endpoint: str) -> bool:
    """vLLM listens on wildcard, ipc and inproc endpoints and connects to any other."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def reachable(endpoint: str, worker_host: str) -> str:
    """An endpoint bound to every interface, as seen from here: on the host that the worker's URL names."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in _ANY_HOST:
        return endpoint
    return f"tcp://{f'[{worker_host}]' if ':' in worker_host else worker_host}:{port}"
