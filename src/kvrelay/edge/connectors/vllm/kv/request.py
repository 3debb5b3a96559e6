"""What the scheduler's half remembers of one request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from msgspec import Struct

from kvrelay.edge.connectors.vllm.kv.chain import Chain, Medium
from kvrelay.edge.connectors.vllm.kv.orders import HIT, Load, LoadReport
from kvrelay.edge.connectors.vllm.kv.records import NONE, LoadRecord
from kvrelay.edge.connectors.vllm.kv.store import Found
from kvrelay.edge.stores.scope import Scope

NOT_WANTED = "not_wanted"  # it was there, and the engine did not take it or never got so far


class Lookup(Struct, frozen=True):
    """The store's answer for one request, or why there is none."""

    chain: Chain | None
    found: Found | None = None
    reason: str | None = None
    ms: float = 0.0


class Tracked:
    """One request between its arrival and its end."""

    __slots__ = (
        "adapter_path",
        "asked_at",
        "block_ids",
        "failed",
        "load",
        "local_tokens",
        "lookup",
        "media",
        "prefill_began_at",
        "prefill_tokens",
        "reason",
        "reports",
        "request",
        "salt",
        "saved_chunks",
    )

    def __init__(self, request: Any) -> None:
        self.request = request
        self.salt: str | None = request.cache_salt
        adapter = getattr(request, "lora_request", None)
        self.adapter_path: str | None = None if adapter is None else adapter.lora_path
        self.media = _media(request)
        self.lookup: Future[Lookup] | None = None
        self.asked_at: float | None = None
        self.failed = False  # it has tried to load, in vain; it is not to try again
        self.reason: str | None = None if self.shareable else "no_token_ids"
        self.local_tokens = 0
        self.block_ids: list[int] = []
        self.load: Load | None = None  # the last one that was ordered
        self.reports: list[LoadReport] = []
        self.saved_chunks = 0
        self.prefill_began_at: float | None = None
        self.prefill_tokens = 0

    @property
    def shareable(self) -> bool:
        """Without token ids for every position there is nothing to name its KV by."""
        request = self.request
        return request.prompt_embeds is None and request.prompt_token_ids is not None and self.media is not None

    @property
    def token_ids(self) -> Sequence[int]:
        ids: Sequence[int] = self.request.all_token_ids
        return ids

    @property
    def awaits_report(self) -> bool:
        return self.load is not None and not self.reports

    def looked_up(self) -> Lookup | None:
        """The answer, if it is here."""
        if self.lookup is None or not self.lookup.done():
            return None
        return self.lookup.result()

    def loaded_blocks(self) -> int:
        """Blocks that the last load really brought."""
        if self.load is None or not self.reports:
            return 0
        return sum(chunk.wanted_blocks for chunk in self.load.chunks[: self.reports[-1].chunks])

    def tokens_by_scope(self, block_size_tokens: int) -> dict[str, int]:
        """Of what was not computed: how far it came."""
        tokens = {Scope.ENGINE.value: self.local_tokens}
        if self.load is not None and self.reports:
            for chunk, scope in zip(self.load.chunks, self.reports[-1].scopes, strict=False):
                if scope is not None:
                    tokens[scope] = tokens.get(scope, 0) + chunk.wanted_blocks * block_size_tokens
        return tokens

    def _reason(self, last: LoadReport | None) -> str | None:
        if last is not None and last.outcome == HIT:
            return None
        return self.reason or (NOT_WANTED if last is None else last.outcome)

    def record(self, block_size_tokens: int) -> LoadRecord:
        lookup, last = self.looked_up(), self.reports[-1] if self.reports else None
        planned = 0 if self.load is None else sum(chunk.wanted_blocks for chunk in self.load.chunks)
        ms = {} if last is None else dict(last.ms)
        if lookup is not None and lookup.found is not None:
            ms["lookup"] = lookup.ms
        if last is not None:
            ms["total"] = ms.get("total", 0.0) + ms.get("lookup", 0.0)
            ms["other"] = ms["total"] - sum(value for step, value in ms.items() if step != "total")
        found = None if lookup is None else lookup.found
        return LoadRecord(
            request_id=self.request.request_id,
            outcome=NONE if last is None else last.outcome,
            reason=self._reason(last),
            prompt_tokens=self.request.num_prompt_tokens,
            local_tokens=self.local_tokens,
            planned_tokens=planned * block_size_tokens,
            loaded_tokens=self.loaded_blocks() * block_size_tokens,
            bytes_read=sum(report.bytes_read for report in self.reports),
            ms={step: round(value, 3) for step, value in ms.items()},
            predicted_fetch_ms=None if found is None else found.fetch_ms,
            predicted_recompute_ms=None if found is None else found.recompute_ms,
            tokens_by_scope=self.tokens_by_scope(block_size_tokens),
        )


def _media(request: Any) -> tuple[Medium, ...] | None:
    """None: there is something in the prompt that has no digest."""
    media = []
    for feature in getattr(request, "mm_features", None) or ():
        digest = feature.mm_hash or feature.identifier
        if not digest:
            return None
        media.append(Medium(digest, feature.mm_position.offset, feature.mm_position.length))
    return tuple(media)
