"""Which connector speaks to which kind of engine, and how `auto` finds out.

Every kind has the same outline: `<engine>/connector.py` (the connector, with what the engine does in its docstring),
`describe.py`, `events.py` and `metrics_map.py` as far as the engine has them.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
import msgspec
from msgspec import Struct

from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import Connector, WorkerAnswerUnusable
from kvrelay.edge.connectors.llamacpp.connector import LlamaCppConnector
from kvrelay.edge.connectors.mock import MockConnector
from kvrelay.edge.connectors.openai import OpenAiConnector
from kvrelay.edge.connectors.sglang.connector import SglangConnector
from kvrelay.edge.connectors.vllm.connector import VllmConnector
from kvrelay.edge.system.unreadable import UNREADABLE
from kvrelay.edge.system.urls import join_url

CONNECTORS: dict[str, Connector] = {
    connector.name: connector
    for connector in (
        VllmConnector(),
        SglangConnector(),
        LlamaCppConnector(),
        OpenAiConnector(),
        MockConnector(),
    )
}


class _Owned(Struct):
    owned_by: str | None = None


class _Models(Struct):
    data: list[_Owned] = []


async def detect(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Connector:
    """Asks the worker what it is. Raises WorkerUnreachable, or WorkerAnswerUnusable when it speaks no known dialect.

    Servers say who owns their models; where something between us and them has changed that, their metrics tell.
    """
    models = await ask.get(session, join_url(url, "/v1/models"), headers)
    if "x-kvrelay-mock" in models.headers:
        return CONNECTORS["mock"]
    found = _by_owner(models.body) if models.status == 200 else None
    if found is None:
        metrics = await ask.get(session, join_url(url, "/metrics"), headers)
        found = _by_metrics(metrics.body) if metrics.status == 200 else None
    if found is not None:
        return found
    if models.status == 200:
        return CONNECTORS["openai"]
    raise WorkerAnswerUnusable(f"{url}/v1/models answered {models.status}")


def _by_owner(models: bytes) -> Connector | None:
    try:
        owners = {model.owned_by for model in msgspec.json.decode(models, type=_Models).data}
    except UNREADABLE:
        return None
    return next((one for one in CONNECTORS.values() if one.owned_by is not None and one.owned_by in owners), None)


def _by_metrics(page: bytes) -> Connector | None:
    text = page.decode("utf-8", "replace")
    return next((one for one in CONNECTORS.values() if one.metrics.is_spoken_on(text)), None)
