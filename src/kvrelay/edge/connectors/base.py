"""What the gateway and the fleet ask of an engine, whatever engine it is.

A connector is stateless and shared by all workers of its kind. Every call says for itself whether it talks to the
worker; answers are valid at the moment they were given and may be asked for again at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
from msgspec import Struct

from kvrelay.core.model.events import KvEvent, WorkerSpec
from kvrelay.core.model.prompt import TokenIds, Usage

if TYPE_CHECKING:
    from kvrelay.edge.connectors.metrics_page import MetricsMap


class EventSource(Struct, frozen=True):
    """Where one rank of a worker publishes its KV events."""

    rank: int
    endpoint: str
    replay: str | None = None  # None: nothing can be asked for again
    topic: str = ""
    bind: bool = False  # True: the worker connects to us


class Description(Struct, frozen=True):
    """What a worker said of itself just now."""

    spec: WorkerSpec
    sources: tuple[EventSource, ...] = ()
    incarnation: str | None = None  # None: it has no way to tell one life from the next
    process_start_s: float | None = None  # as `Scrape` has it, to be compared with later scrapes
    version: str | None = None


class ReportedLoad(Struct, frozen=True):
    """Gauges of one rank; None where the engine has no such gauge."""

    running_requests: int | None = None
    waiting_requests: int | None = None
    kv_usage_ratio: float | None = None


class Scrape(Struct, frozen=True):
    """One reading of a worker's metrics page in canonical words. Counters are totals since the process began."""

    ranks: Mapping[int, ReportedLoad]
    process_start_s: float | None = None  # on whatever clock the engine has: it only differs from one life to the next
    prefix_queries_tokens: int | None = None
    prefix_hits_tokens: int | None = None
    hits_by_tier_tokens: Mapping[str, int] = {}  # empty where the engine does not tell them apart


class DecodedBatch(Struct, frozen=True, eq=False):
    """One event message: who published it, when by its own clock, and what it says."""

    rank: int
    events: tuple[KvEvent, ...]
    published_s: float


class WorkerUnreachable(Exception):
    """No answer: refused, reset or too late. `refused` means that no process listens there now."""

    def __init__(self, detail: str, *, refused: bool) -> None:
        super().__init__(detail)
        self.refused = refused


class WorkerAnswerUnusable(Exception):
    """The worker answered, but not what its kind of engine answers."""


class MalformedEvents(Exception):
    """An event message that breaks the engine's own format; nothing of it was used."""


class Connector(Protocol):
    """One kind of engine."""

    name: str
    owned_by: str | None
    """What its `/v1/models` says of who owns the models; None where that tells nothing."""
    shows_token_ids: bool
    """Whether `return_token_ids` puts the ids of the prompt and of each piece of text into a stream."""
    counts_streams: bool
    """Whether `stream_options.include_usage` adds one event without choices to a stream, and changes nothing else."""
    metrics: MetricsMap
    """What its metrics page calls our words; see `metrics_page`."""

    async def describe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Description:
        """Asks the worker what it is. Raises WorkerUnreachable or WorkerAnswerUnusable."""
        ...

    async def probe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> str | None:
        """Asks the worker whether it is healthy: None for yes, else why not. Raises WorkerUnreachable."""
        ...

    async def scrape(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Scrape | None:
        """Reads the worker's metrics page; None when it has none. Raises WorkerUnreachable."""
        ...

    def decode_events(self, payload: bytes) -> DecodedBatch:
        """Decodes one event message. Raises MalformedEvents."""
        ...

    def usage_from_body(self, body: bytes) -> Usage:
        """Token counts of a whole (not streamed) answer; empty when it has none."""
        ...

    def usage_from_sse(self, tail: bytes) -> Usage:
        """Token counts from the last bytes of a stream, which may begin in the middle of an event."""
        ...

    def with_kv_report(self, usage: Usage, report: bytes) -> Usage:
        """`usage` with what the worker's KV connector reported of the same request."""
        ...

    async def reset(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        """Asks the worker to drop its prefix cache, which it has done when this returns.

        Raises WorkerUnreachable, or WorkerAnswerUnusable with what it said instead; it may have kept all then.
        """
        ...

    async def sharing(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
        *,
        kv_report: str | None,
        on: bool | None,
    ) -> bool | None:
        """Has the worker load KV from shared tiers and save it there, or neither; `on` None only asks.

        Answers what holds now for every request that comes; None: it has no such tier. What is on its way still ends.
        Raises WorkerUnreachable, or WorkerAnswerUnusable with why it cannot be told or asked.
        """
        ...

    async def tokenize(
        self,
        session: aiohttp.ClientSession,
        url: str,
        payload: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> TokenIds:
        """Asks the worker for the token ids of `{"prompt"}` or `{"messages"}`.

        Raises WorkerUnreachable or WorkerAnswerUnusable.
        """
        ...
