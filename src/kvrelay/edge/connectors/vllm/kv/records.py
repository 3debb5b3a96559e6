"""What remote KV really did for each request, and the sums of it.

The sums are formed from the records and from nothing else, so that a counter on a dashboard and the receipts under it
cannot tell different stories.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from typing import Any

import msgspec
from msgspec import Struct

REMEMBERED = 4096
NONE = "none"
# "cmpl-<what the client called it>-0-1a2b3c4d": the engine puts the kind in front and its own numbers behind.
_ENGINE_ID = re.compile(r"^(?:\d+_)?(?:[a-z]+-)?(?P<given>.+?)(?:-\d+)?-[0-9a-f]{8}$")


class LoadRecord(Struct, kw_only=True, omit_defaults=True):
    """The outcome beside the plan; tokens and bytes count what was verified and used.

    `outcome`: `hit` (all that was planned came), `none` (nothing was planned; `reason` says why), or what was wrong
    with the first chunk that did not come.
    """

    request_id: str
    outcome: str
    reason: str | None = None
    prompt_tokens: int
    local_tokens: int = 0
    planned_tokens: int = 0
    loaded_tokens: int = 0
    bytes_read: int = 0
    ms: dict[str, float] = {}
    predicted_fetch_ms: float | None = None
    predicted_recompute_ms: float | None = None
    tokens_by_scope: dict[str, int] = {}

    @property
    def cached_tokens(self) -> int:
        """What was not computed. The engine's own figure is the plan, also after a load that failed."""
        return self.local_tokens + self.loaded_tokens

    def told(self) -> dict[str, Any]:
        """For a receipt, which knows the request by its own name."""
        told = msgspec.to_builtins(self)
        del told["request_id"]
        return {**told, "cached_tokens": self.cached_tokens}


class Records:
    """The last records by request, and counters since the start. Safe to read from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: OrderedDict[str, LoadRecord] = OrderedDict()
        self._totals: Counter[str] = Counter()
        self._since: Counter[str] = Counter()

    def add(self, record: LoadRecord) -> None:
        with self._lock:
            self._last[given_id(record.request_id)] = record
            if len(self._last) > REMEMBERED:
                self._last.popitem(last=False)
        self.count(
            {
                f"loads_{record.outcome}": 1,
                "loaded_tokens": record.loaded_tokens,
                "planned_tokens": record.planned_tokens,
                "read_bytes": record.bytes_read,
            }
        )

    def count(self, amounts: dict[str, int]) -> None:
        with self._lock:
            self._totals.update(amounts)
            self._since.update(amounts)

    def find(self, request_id: str) -> LoadRecord | None:
        """By the id that the client (or the gateway) gave in `x-request-id`."""
        with self._lock:
            return self._last.get(request_id)

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)

    def take_since(self) -> dict[str, int]:
        """What was counted since the last call of this."""
        with self._lock:
            since, self._since = dict(self._since), Counter()
        return since


def given_id(engine_id: str) -> str:
    """The request's id as it was given to the engine's server."""
    found = _ENGINE_ID.match(engine_id)
    return engine_id if found is None else found["given"]
