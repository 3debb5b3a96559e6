"""vLLM: events, metrics, usage and tokenizer put together behind the connector's outline."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import aiohttp
import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import DecodedBatch, Description, Scrape, WorkerAnswerUnusable
from kvrelay.edge.connectors.openai import OpenAiConnector
from kvrelay.edge.connectors.vllm import describe, events, metrics_map
from kvrelay.edge.system.urls import join_url


class _Tokenized(Struct):
    tokens: list[int]


class VllmConnector(OpenAiConnector):
    """An OpenAI server that also tells of its cache, its load and its tokens."""

    name = "vllm"
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
        return metrics_map.read_page(answer.body.decode("utf-8", "replace")).scrape()

    def decode_events(self, payload: bytes) -> DecodedBatch:
        return events.decode_batch(payload)

    async def tokenize(
        self,
        session: aiohttp.ClientSession,
        url: str,
        payload: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> TokenIds:
        answer = await ask.post_json(session, join_url(url, "/tokenize"), headers or {}, payload, _Tokenized)
        try:
            return np.frombuffer(array("I", answer.tokens), dtype=np.uint32)
        except OverflowError as error:
            raise WorkerAnswerUnusable(f"/tokenize answered a token id out of range: {error}") from error
