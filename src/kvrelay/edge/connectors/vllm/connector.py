"""vLLM: events, metrics, usage and tokenizer put together behind the connector's outline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import DecodedBatch, Description, Scrape, WorkerAnswerUnusable
from kvrelay.edge.connectors.openai import OpenAiConnector
from kvrelay.edge.connectors.vllm import describe, events, metrics_map
from kvrelay.edge.system.urls import join_url


class _Reset(Struct):
    success: bool = True  # releases before 0.10 answer without a body


class VllmConnector(OpenAiConnector):
    """An OpenAI server that also tells of its cache, its load and its tokens."""

    name = "vllm"
    owned_by: str | None = "vllm"
    metrics = metrics_map.MAP
    shows_token_ids = True
    counts_streams = True

    async def describe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Description:
        return await describe.describe(
            session, url, headers, engine=self.name, worker_binds=describe.binds_by_vllms_rule
        )

    async def probe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> str | None:
        answer = await ask.get(session, join_url(url, "/health"), headers)
        return None if answer.status == 200 else f"/health answered {answer.status}"

    async def scrape(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Scrape | None:
        answer = await ask.get(session, join_url(url, "/metrics"), headers)
        if answer.status != 200:
            return None
        return metrics_map.scrape(self.metrics.read(answer.body.decode("utf-8", "replace")))

    def decode_events(self, payload: bytes) -> DecodedBatch:
        return events.decode_batch(payload)

    async def reset(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        """Only servers started with VLLM_SERVER_DEV_MODE=1 have the path; the event follows with the next step."""
        path = "/reset_prefix_cache"
        answer = await ask.post(session, join_url(url, path), headers)
        if answer.status != 200:
            raise WorkerAnswerUnusable(f"{path} answered {answer.status}")
        if answer.body and not ask.as_json(answer, path, _Reset).success:
            raise WorkerAnswerUnusable(f"{path} was refused: blocks are in use")

    async def tokenize(
        self,
        session: aiohttp.ClientSession,
        url: str,
        payload: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> TokenIds:
        return await ask.token_ids(session, join_url(url, "/tokenize"), headers or {}, payload)
