"""SGLang behind the connector's outline.

What the servers do, read in the packages of 0.5.19 to 0.5.23. None of them runs without a GPU toolchain, so metrics and
answers are held against pages laid out as their sources do; events against what their own classes encoded, and against
the radix cache, recorder and publisher of 0.5.23, which do run (`tests/real/test_sglang.py`).

- `/server_info` (before: `/get_server_info`) is the resolved configuration with `version`, `page_size`, `dp_size`,
  `kv_events_config` (the flag's JSON text) and `kv_events` (the publisher as routers may dial it, or null).
  `/model_info` (before: `/get_model_info`) knows the model, `/v1/models` also the adapters.
- KV events (`--kv-events-config`): vLLM's three frames and payload `[ts, events, attn_dp_rank]`. Events are arrays up
  to 0.5.19 and maps from 0.5.20 on; see `events`. Rank r listens r ports higher. `flush_cache` queues an
  AllBlocksCleared, which goes out when the scheduler idles or with the next batch. Replies of a replay carry the
  topic from 0.5.22 on.
- The page size is 1 token unless `--page-size` says otherwise: events and index then have one entry per token.
- `/metrics` exists with `--enable-metrics`; see `metrics_map`. It has no process start time: what tells one life from
  the next is `startup_time` (measured durations) together with `random_seed`.
- Usage has `prompt_tokens_details.cached_tokens` with `--enable-cache-report` only. Up to 0.5.21 the details are left
  out when nothing was hit, so there "nothing" and "not reported" look the same and both are unknown to us.
- `/health` generates one token when the server is idle and answers no sooner than after a second.
- `/flush_cache` answers 400 while requests run.
- `/tokenize` takes `prompt` or `messages`; `cache_salt` in a request separates caches.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
import msgspec

from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import DecodedBatch, Description, Scrape, WorkerAnswerUnusable
from kvrelay.edge.connectors.metrics_page import Page
from kvrelay.edge.connectors.openai import EngineConnector
from kvrelay.edge.connectors.sglang import describe, events, metrics_map
from kvrelay.edge.system.urls import join_url


class SglangConnector(EngineConnector):
    """An OpenAI server with events, metrics and a tokenizer of its own."""

    name = "sglang"
    owned_by = "sglang"
    metrics = metrics_map.MAP

    async def describe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Description:
        description = await describe.describe(session, url, headers, engine=self.name)
        scrape = await self.scrape(session, url, headers)
        return msgspec.structs.replace(description, process_start_s=scrape.process_start_s if scrape else None)

    def read_page(self, page: Page, answer: ask.Answer) -> Scrape:
        return metrics_map.scrape(page)

    def decode_events(self, payload: bytes) -> DecodedBatch:
        return events.decode_batch(payload)

    async def reset(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        answer = await ask.post(session, join_url(url, "/flush_cache"), headers)
        if answer.status != 200:
            raise WorkerAnswerUnusable(f"/flush_cache answered {answer.status}; it flushes only while nothing runs")
