"""A worker's metrics page as we read it: which engine it is, and what each canonical metric is called there."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from msgspec import Struct

from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.metrics_page import MappedMetric
from kvrelay.edge.connectors.registry import detect
from kvrelay.edge.system.urls import join_url


class Survey(Struct, frozen=True):
    url: str
    engine: str
    version: str | None
    has_page: bool
    metrics: tuple[MappedMetric, ...]


async def survey(url: str, headers: Mapping[str, str], *, timeout_s: float) -> Survey:
    """Asks the worker at a canonical URL. Raises WorkerUnreachable or WorkerAnswerUnusable."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        connector = await detect(session, url, headers)
        description = await connector.describe(session, url, headers)
        answer = await ask.get(session, join_url(url, "/metrics"), headers)
    has_page = answer.status == 200
    page = connector.metrics.read(answer.body.decode("utf-8", "replace") if has_page else "")
    return Survey(url, connector.name, description.version, has_page, page.mapped())
