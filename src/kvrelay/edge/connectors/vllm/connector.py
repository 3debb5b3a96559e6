"""vLLM: events, metrics, usage and tokenizer put together behind the connector's outline."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from msgspec import Struct

from kvrelay.core.model.prompt import Usage
from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import DecodedBatch, Description, Scrape, WorkerAnswerUnusable
from kvrelay.edge.connectors.metrics_page import Page
from kvrelay.edge.connectors.openai import EngineConnector
from kvrelay.edge.connectors.vllm import describe, events, kv_report, metrics_map
from kvrelay.edge.system.urls import join_url


class _Reset(Struct):
    success: bool = True  # releases before 0.10 answer without a body


class VllmConnector(EngineConnector):
    """An OpenAI server that also tells of its cache, its load and its tokens."""

    name = "vllm"
    owned_by: str | None = "vllm"
    metrics = metrics_map.MAP
    shows_token_ids = True

    async def describe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Description:
        return await describe.describe(
            session, url, headers, engine=self.name, worker_binds=describe.binds_by_vllms_rule
        )

    def read_page(self, page: Page, answer: ask.Answer) -> Scrape:
        return metrics_map.scrape(page)

    def decode_events(self, payload: bytes) -> DecodedBatch:
        return events.decode_batch(payload)

    def usage_from_body(self, body: bytes) -> Usage:
        return kv_report.with_report_in_body(super().usage_from_body(body), body)

    def with_kv_report(self, usage: Usage, report: bytes) -> Usage:
        return kv_report.with_report(usage, report)

    async def reset(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        """Only servers started with VLLM_SERVER_DEV_MODE=1 have the path; the event follows with the next step."""
        path = "/reset_prefix_cache"
        answer = await ask.post(session, join_url(url, path), headers)
        if answer.status != 200:
            raise WorkerAnswerUnusable(f"{path} answered {answer.status}")
        if answer.body and not ask.as_json(answer, path, _Reset).success:
            raise WorkerAnswerUnusable(f"{path} was refused: blocks are in use")

    async def sharing(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
        *,
        kv_report: str | None,
        on: bool | None,
    ) -> bool | None:
        """Our KV connector answers on a port of its own; others have no switch, and the engine does not name them."""
        if kv_report is None:
            raise WorkerAnswerUnusable("no `kv_report` is set for it, so nobody knows whether it shares KV")
        return await ask.sharing(session, join_url(kv_report, "/sharing"), {}, on)
