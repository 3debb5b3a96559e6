"""llama.cpp's own server behind the connector's outline.

What it does, seen on build 11549 (`tests/real/test_llamacpp.py` runs it) and read in the source of build 11434:

- It has slots (`/props`: `total_slots`), each with one prompt and what was generated after it. A new prompt goes to
  the idle slot with the longest common prefix if that is more than a tenth of it (`--slot-prompt-similarity`), else
  to the slot used longest ago, and hits whole tokens, at most all but the last. The rest of the old prompt is gone,
  unless more than half of it differs: then it is first put into a store of whole prompts in RAM (`--cache-ram`, 8 GiB
  by default, 0 for none), from where it comes back as a whole. So prompts do not share blocks: what a slot overwrites
  is gone for everybody.
- `cache_prompt: false` in a request hits nothing; `id_slot` pins a slot. Both pass through the gateway.
- No events: residency is guessed from routing, by prompts (`core/index/whole_prompts.py`), and marked `approximate`.
  What it hit corrects the guess.
- Usage always has `prompt_tokens_details.cached_tokens` (`timings.cache_n` is the same number). Streams of
  `/v1/completions` carry it in their last chunk, asked or not; those of `/v1/chat/completions` in an extra event,
  only if asked.
- `/metrics` only with `--metrics` (501 otherwise); the header `Process-Start-Time-Unix` of its answer is the start of
  the process on the machine's monotonic clock, in microseconds, in spite of its name.
- `/health` is 503 while the model loads. `/slots` shows who works on what, and nothing of what is cached.
- `/tokenize` wants `content`; chats are rendered by `/apply-template` first. The server adds the model's first token
  by itself (`add_special`) to texts and chats alike, and reads special tokens in both.
- Its cache cannot be dropped over HTTP: `/slots/N?action=erase` empties a slot (with `--slot-save-path` only), not
  the RAM.
- Adapters are set per request by number (`lora`), not by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import Description, Scrape, WorkerAnswerUnusable
from kvrelay.edge.connectors.llamacpp import metrics_map
from kvrelay.edge.connectors.metrics_page import Page
from kvrelay.edge.connectors.openai import EngineConnector
from kvrelay.edge.system.urls import join_url

START_HEADER = "process-start-time-unix"


class Props(Struct):
    total_slots: int
    build_info: str | None = None


class _Rendered(Struct):
    prompt: str


class LlamaCppConnector(EngineConnector):
    """An OpenAI server with metrics and a tokenizer, and without events."""

    name = "llamacpp"
    owned_by = "llamacpp"
    metrics = metrics_map.MAP

    async def describe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Description:
        description = await super().describe(session, url, headers)
        props = await ask.get_json(session, join_url(url, "/props"), headers, Props)
        scrape = await self.scrape(session, url, headers)
        started_s = None if scrape is None else scrape.process_start_s
        return msgspec.structs.replace(
            description,
            spec=msgspec.structs.replace(description.spec, keeps_whole_prompts=True),
            incarnation=None if started_s is None else f"{started_s:.6f}",
            process_start_s=started_s,
            version=props.build_info,
        )

    def read_page(self, page: Page, answer: ask.Answer) -> Scrape:
        return metrics_map.scrape(page, started_us=answer.headers.get(START_HEADER))

    async def tokenize(
        self,
        session: aiohttp.ClientSession,
        url: str,
        payload: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> TokenIds:
        text = payload.get("prompt")
        if text is None:
            rendered = await ask.post_json(session, join_url(url, "/apply-template"), headers or {}, payload, _Rendered)
            text = rendered.prompt
        question = {"content": text, "add_special": True, "parse_special": True}
        return await ask.token_ids(session, join_url(url, "/tokenize"), headers or {}, question)

    async def reset(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        raise WorkerAnswerUnusable("llama.cpp has no way to drop its prompt cache; restart it")
