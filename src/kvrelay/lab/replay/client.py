"""The load generator's side of one streaming request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.system.urls import canonical_worker_url, join_url
from kvrelay.lab.replay.request_body import PATHS, Form, request_body
from kvrelay.lab.replay.stream import Outcome, read_stream

SESSION_HEADER, REQUEST_HEADER = "x-session-id", "x-request-id"
WORKER_HEADER, RECEIPT_HEADER = "x-kvrelay-worker", "x-kvrelay-request-id"


def completion_body(model: str, token_ids: TokenIds, max_tokens: int, *, cache_salt: str | None = None) -> bytes:
    """The form that every one of our arms uses: token ids to `/v1/completions`."""
    return request_body(model, token_ids, max_tokens, form="token_ids", cache_salt=cache_salt)


class CompletionClient:
    """Sends streaming requests to a gateway, to another router, or to bare workers.

    With several URLs (bare workers) requests take them in turn, in the order in which they leave: the control that a
    router has to beat. Nothing is retried here: what failed is reported as failed.
    """

    def __init__(
        self, *urls: str, timeout_s: float, form: Form = "token_ids", headers: Mapping[str, str] | None = None
    ) -> None:
        assert urls, "a client needs at least one URL"
        self._bases: Sequence[str] = [canonical_worker_url(url) for url in urls]
        self._turns = itertools.cycle(self._bases)
        self.form: Form = form
        self._headers = dict(headers or {})
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> CompletionClient:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_chunk_sent.append(_note_written)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, trace_configs=[tracing]
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(self, body: bytes, *, request_id: str, session_id: str) -> Outcome:
        assert self._session is not None
        base = next(self._turns)
        headers = {
            **self._headers,
            "content-type": "application/json",
            REQUEST_HEADER: request_id,
            SESSION_HEADER: session_id,
        }
        outcome = Outcome(sent_s=time.monotonic())
        try:
            await self._exchange(self._session, base, body, headers, outcome)
        except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as problem:
            outcome.failure = f"{type(problem).__name__}: {problem}"
        outcome.ended_s = time.monotonic()
        return outcome

    async def _exchange(
        self, session: aiohttp.ClientSession, base: str, body: bytes, headers: Mapping[str, str], outcome: Outcome
    ) -> None:
        url = join_url(base, PATHS[self.form])
        async with session.post(url, data=body, headers=headers, trace_request_ctx=outcome) as response:
            outcome.http_status = response.status
            outcome.worker = response.headers.get(WORKER_HEADER) or self._bare_worker(base)
            outcome.receipt_id = response.headers.get(RECEIPT_HEADER)
            if response.status != 200:
                outcome.failure = f"HTTP {response.status}"
                await response.read()
                return
            await read_stream(response.content, outcome)
        if outcome.failure is None and not outcome.done:
            outcome.failure = "the stream ended without [DONE]"

    def _bare_worker(self, base: str) -> str | None:
        """Behind one URL there may be anybody; of several we know which one we took."""
        return base if len(self._bases) > 1 else None


async def _note_written(
    _session: aiohttp.ClientSession, context: object, _chunk: aiohttp.TraceRequestChunkSentParams
) -> None:
    outcome: Outcome = context.trace_request_ctx  # type: ignore[attr-defined]
    outcome.written_s = time.monotonic()
