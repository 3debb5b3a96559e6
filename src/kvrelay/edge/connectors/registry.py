"""Which connector speaks to which kind of engine, and how `auto` finds out."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import Connector, WorkerAnswerUnusable
from kvrelay.edge.connectors.mock import MockConnector
from kvrelay.edge.connectors.openai import OpenAiConnector
from kvrelay.edge.connectors.vllm.connector import VllmConnector
from kvrelay.edge.system.urls import join_url

CONNECTORS: dict[str, Connector] = {
    connector.name: connector for connector in (VllmConnector(), MockConnector(), OpenAiConnector())
}


async def detect(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Connector:
    """Asks the worker what it is. Raises WorkerUnreachable, or WorkerAnswerUnusable when it speaks no known dialect."""
    models = await ask.get(session, join_url(url, "/v1/models"), headers)
    if "x-kvrelay-mock" in models.headers:
        return CONNECTORS["mock"]
    metrics = await ask.get(session, join_url(url, "/metrics"), headers)
    if metrics.status == 200 and b"vllm:" in metrics.body:
        return CONNECTORS["vllm"]
    if models.status == 200:
        return CONNECTORS["openai"]
    raise WorkerAnswerUnusable(f"{url}/v1/models answered {models.status}")
