"""Any server with the OpenAI paths: no events, no metrics page, no tokenizer. Its residency is guessed from routing.

Nor does it say in which units it caches. The guess needs one, and a wrong one costs no more than its size per prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
from msgspec import Struct

from kvrelay.core.model.events import WorkerSpec
from kvrelay.core.model.prompt import TokenIds, Usage
from kvrelay.edge.connectors import ask, usage
from kvrelay.edge.connectors.base import DecodedBatch, Description, MalformedEvents, Scrape, WorkerAnswerUnusable
from kvrelay.edge.connectors.metrics_page import CANONICAL, MetricsMap, Page
from kvrelay.edge.system.urls import join_url

GUESSED_BLOCK_TOKENS = 16


class _Model(Struct):
    id: str
    parent: str | None = None  # set for adapters
    root: str | None = None


class Models(Struct):
    """The answer of /v1/models."""

    data: list[_Model]

    @property
    def bases(self) -> tuple[str, ...]:
        return tuple(model.id for model in self.data if model.parent is None)

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(model.id for model in self.data if model.parent is not None)


class OpenAiConnector:
    name = "openai"
    owned_by: str | None = None
    metrics = MetricsMap(dict.fromkeys(CANONICAL, ()))
    shows_token_ids = False
    counts_streams = False  # OpenAI's own servers put `usage: null` into every event, others refuse the question

    async def describe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Description:
        models = await ask.get_json(session, join_url(url, "/v1/models"), headers, Models)
        spec = WorkerSpec(
            separates_salts=False,
            url=url,
            models=models.bases,
            adapters=models.adapters,
            block_size_tokens=GUESSED_BLOCK_TOKENS,
            sends_events=False,
            engine=self.name,
        )
        return Description(spec=spec)

    async def probe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> str | None:
        answer = await ask.get(session, join_url(url, "/v1/models"), headers)
        return None if answer.status < 500 else f"/v1/models answered {answer.status}"

    async def scrape(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Scrape | None:
        return None

    def decode_events(self, payload: bytes) -> DecodedBatch:
        raise MalformedEvents("this kind of worker has no events")

    def usage_from_body(self, body: bytes) -> Usage:
        return usage.usage_from_body(body)

    def usage_from_sse(self, tail: bytes) -> Usage:
        return usage.usage_from_sse(tail)

    def with_kv_report(self, usage: Usage, report: bytes) -> Usage:
        return usage

    async def reset(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        raise WorkerAnswerUnusable("this kind of worker cannot be told to drop its cache")

    async def sharing(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
        *,
        kv_report: str | None,
        on: bool | None,
    ) -> bool | None:
        raise WorkerAnswerUnusable("this kind of worker cannot be told to leave shared tiers alone")

    async def tokenize(
        self,
        session: aiohttp.ClientSession,
        url: str,
        payload: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> TokenIds:
        raise WorkerAnswerUnusable("this kind of worker has no tokenizer")


class EngineConnector(OpenAiConnector):
    """An OpenAI server that says more: `/health` of its engine, a metrics page, token ids under `/tokenize`."""

    counts_streams = True

    async def probe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> str | None:
        answer = await ask.get(session, join_url(url, "/health"), headers)
        return None if answer.status == 200 else f"/health answered {answer.status}"

    async def scrape(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Scrape | None:
        answer = await ask.get(session, join_url(url, "/metrics"), headers)
        if answer.status != 200:
            return None
        return self.read_page(self.metrics.read(answer.body.decode("utf-8", "replace")), answer)

    def read_page(self, page: Page, answer: ask.Answer) -> Scrape:
        """What the metrics page of this engine says of its load."""
        raise NotImplementedError

    async def tokenize(
        self,
        session: aiohttp.ClientSession,
        url: str,
        payload: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> TokenIds:
        return await ask.token_ids(session, join_url(url, "/tokenize"), headers or {}, payload)
