"""What came of loading KV for each request, in the words that a real engine's KV connector uses for a receipt.

In an answer that is not streamed it is a member of the body; after a stream it is asked for by the request's id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.scope import Scope
from kvrelay.edge.stores.tiered import FetchOutcome, LookupPlan

NONE, ABSENT, ALREADY_LOCAL, SLOWER = "none", "absent", "already_local", "slower_than_recompute"
UNAVAILABLE = "unavailable"
REMEMBERED = 1024
N = TypeVar("N", int, float)


class Load(Struct, frozen=True):
    """One prompt's. `outcome`: `hit`, `none` (nothing was to be fetched, `reason` says why), or what was wrong with the
    first chunk that did not come. A time that was not predicted is None."""

    outcome: str
    reason: str | None
    tokens: int
    bytes_read: int
    ms: Mapping[str, float]
    predicted_fetch_ms: float | None
    predicted_recompute_ms: float | None
    tokens_by_scope: Mapping[str, int]


def not_fetched(plan: LookupPlan, *, cached_tokens: int) -> Load:
    """The plan was not followed: `cached_tokens` are here already, or computing is quicker."""
    reason = SLOWER
    if not plan.keys:
        reason = UNAVAILABLE if plan.unasked else ABSENT
    elif plan.tokens <= cached_tokens:
        reason = ALREADY_LOCAL
    return _of_plan(plan, NONE, reason)


def fetched(plan: LookupPlan, outcome: FetchOutcome) -> Load:
    scopes = [scope for scope in outcome.scopes[: outcome.leading_hits] if scope is not None]
    tokens_by_scope = {scope.value: scopes.count(scope) * plan.shape.tokens for scope in dict.fromkeys(scopes)}
    bad = next((one.value for one in outcome.outcomes if one is not Outcome.HIT), None)
    return Load(
        bad or Outcome.HIT.value,
        bad,
        outcome.leading_hits * plan.shape.tokens,
        outcome.bytes_read,
        {"lookup": plan.ms, "fetch": outcome.ms},
        plan.predicted_fetch_ms,
        plan.predicted_recompute_ms,
        tokens_by_scope,
    )


def _of_plan(plan: LookupPlan, outcome: str, reason: str) -> Load:
    times = plan.predicted_fetch_ms, plan.predicted_recompute_ms
    return Load(outcome, reason, 0, 0, {"lookup": plan.ms}, *times, {})


class LoadReports:
    """By engine request while one is under way; by the client's id when it has ended. Of both, the last ones."""

    def __init__(self) -> None:
        self.contract_differs: tuple[str, ...] = ()  # of others that use the same store
        self._open: OrderedDict[str, Load] = OrderedDict()
        self._told: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def note(self, engine_id: str, load: Load) -> None:
        self._open[engine_id] = load
        if len(self._open) > REMEMBERED:
            self._open.popitem(last=False)

    def forget(self, engine_ids: Sequence[str]) -> None:
        for engine_id in engine_ids:
            self._open.pop(engine_id, None)

    def tell(self, client_id: str, engine_ids: Sequence[str], cached_tokens: int) -> dict[str, Any] | None:
        """The report of an answer that is complete; None when nothing was noted for it. Several prompts of one request
        add up, and the first one that did not simply hit gives the outcome."""
        loads = [load for engine_id in engine_ids if (load := self._open.pop(engine_id, None)) is not None]
        if not loads:
            return None
        first = next((load for load in loads if load.outcome != Outcome.HIT.value), loads[0])
        tokens = sum(load.tokens for load in loads)
        told: dict[str, Any] = {
            "outcome": first.outcome,
            "reason": first.reason,
            "cached_tokens": cached_tokens,
            "loaded_tokens": tokens,
            "bytes_read": sum(load.bytes_read for load in loads),
            "ms": _added(load.ms for load in loads),
            "predicted_fetch_ms": _sum_known(load.predicted_fetch_ms for load in loads),
            "predicted_recompute_ms": _sum_known(load.predicted_recompute_ms for load in loads),
            "contract_differs": list(self.contract_differs),
            "tokens_by_scope": _added(
                [*(load.tokens_by_scope for load in loads), {Scope.ENGINE.value: max(0, cached_tokens - tokens)}]
            ),
        }
        self._told[client_id] = told
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        return told

    def find(self, client_id: str) -> dict[str, Any] | None:
        return self._told.get(client_id)


def _added(several: Iterable[Mapping[str, N]]) -> dict[str, N]:
    total: dict[str, N] = {}
    for one in several:
        for name, value in one.items():
            total[name] = total[name] + value if name in total else value
    return total


def _sum_known(times_ms: Iterable[float | None]) -> float | None:
    """None as soon as one of them is not known."""
    total = 0.0
    for time_ms in times_ms:
        if time_ms is None:
            return None
        total += time_ms
    return total
