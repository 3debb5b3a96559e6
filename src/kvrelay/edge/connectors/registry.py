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

_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp"}  # `owned_by` of the models they list
_PREFIXES = {b"vllm:": "vllm", b"sglang:": "sglang", b"llamacpp:": "llamacpp"}  # of their metrics


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
    name = _owner(models.body) if models.status == 200 else None
    if name is None:
        metrics = await ask.get(session, join_url(url, "/metrics"), headers)
        found = metrics.body if metrics.status == 200 else b""
        name = next((engine for prefix, engine in _PREFIXES.items() if prefix in found), None)
    if name is not None:
        return CONNECTORS[name]
    if models.status == 200:
        return CONNECTORS["openai"]
    raise WorkerAnswerUnusable(f"{url}/v1/models answered {models.status}")


def _owner(body: bytes) -> str | None:
    try:
        models = msgspec.json.decode(body, type=_Models)
    except msgspec.DecodeError:
        return None
    return next((_OWNERS[model.owned_by] for model in models.data if model.owned_by in _OWNERS), None)
