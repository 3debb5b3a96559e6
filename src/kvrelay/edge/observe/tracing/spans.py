"""A receipt as spans: the request, its wait and decision, its attempts, and what the worker did in the last one.

Everything is known when the request has ended, so nothing is timed on its way. Names and attributes follow the
semantic conventions for generative AI; what is ours begins with `kvrelay.`. No prompt, answer, key or token is there to
be told: a receipt has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from kvrelay.core.model.units import Status
from kvrelay.core.receipts.receipt import Attempt, Receipt
from kvrelay.edge.observe.tracing.context import Trace

Value = str | int | float | bool
Kind = Literal["server", "client", "internal"]

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class SpanRecord(Struct, frozen=True, kw_only=True):
    """Times are in milliseconds after the request's arrival. `error` is None where nothing went wrong."""

    name: str
    span_id: int
    parent_id: int | None
    kind: Kind
    began_ms: float
    ended_ms: float
    attributes: Mapping[str, Value]
    error: str | None = None


def spans_of(receipt: Receipt, trace: Trace, new_id: Callable[[], int]) -> Iterator[SpanRecord]:
    """The request's span comes first; every other one lies below it."""
    end_ms = receipt.e2e_ms or 0.0
    yield SpanRecord(
        name=_name(receipt),
        span_id=trace.span_id,
        parent_id=None if trace.parent is None else trace.parent.span_id,
        kind="server",
        began_ms=0.0,
        ended_ms=end_ms,
        attributes=_of_request(receipt),
        error=_error(receipt),
    )
    first_ms = receipt.attempts[0].started_ms if receipt.attempts else end_ms
    decision_ms = (receipt.decision_us or 0.0) / 1e3
    decided_ms = max(0.0, first_ms - decision_ms)
    if receipt.router_queue_ms:
        waited_ms = max(0.0, decided_ms - receipt.router_queue_ms)
        yield _inner("queue", new_id(), trace.span_id, waited_ms, decided_ms, {})
    if receipt.decision_us is not None:
        yield _inner("decide", new_id(), trace.span_id, decided_ms, first_ms, _of_decision(receipt))
    for attempt, until_ms in zip(receipt.attempts, _ends(receipt, end_ms), strict=True):
        yield from _attempt(receipt, attempt, until_ms, trace, new_id)


def _ends(receipt: Receipt, end_ms: float) -> list[float]:
    """An attempt lasts until the next one begins."""
    if not receipt.attempts:
        return []
    return [*(attempt.started_ms for attempt in receipt.attempts[1:]), end_ms]


def _attempt(
    receipt: Receipt, attempt: Attempt, until_ms: float, trace: Trace, new_id: Callable[[], int]
) -> Iterator[SpanRecord]:
    span_id = trace.attempts.get(attempt.attempt) or new_id()
    yield SpanRecord(
        name=f"attempt {attempt.attempt}",
        span_id=span_id,
        parent_id=trace.span_id,
        kind="client",
        began_ms=attempt.started_ms,
        ended_ms=until_ms,
        attributes=_known(
            {
                "kvrelay.worker": attempt.worker,
                "kvrelay.worker.incarnation": attempt.incarnation,
                "kvrelay.route.reason": attempt.reason.value,
                "http.response.status_code": attempt.http_status,
                "gen_ai.provider.name": receipt.engine,
            }
        ),
        error=None if attempt.fault is None else attempt.fault.value,
    )
    if attempt is receipt.attempts[-1] and attempt.fault is None:
        yield from _worker(receipt, attempt.started_ms, until_ms, span_id, new_id)


def _worker(
    receipt: Receipt, began_ms: float, ended_ms: float, parent_id: int, new_id: Callable[[], int]
) -> Iterator[SpanRecord]:
    """As seen from here. Fetches happen before the prefill that needs them, one after the other."""
    first_ms = receipt.ttft_ms
    if first_ms is None or first_ms < began_ms:
        return
    at_ms = began_ms
    for stage, took_ms in receipt.remote_path_ms.items():
        read = _known({"kvrelay.remote_bytes_read": receipt.remote_bytes_read})
        yield _inner(f"store fetch: {stage}", new_id(), parent_id, at_ms, min(at_ms + took_ms, first_ms), read)
        at_ms = min(at_ms + took_ms, first_ms)
    cached = _known({"gen_ai.usage.cache_read.input_tokens": receipt.actual_cached_tokens})
    yield _inner("worker: to first token", new_id(), parent_id, at_ms, first_ms, cached)
    output = _known({"gen_ai.usage.output_tokens": receipt.completion_tokens})
    yield _inner("worker: generate", new_id(), parent_id, first_ms, ended_ms, output)


def _inner(
    name: str, span_id: int, parent_id: int, began_ms: float, ended_ms: float, attributes: Mapping[str, Value]
) -> SpanRecord:
    return SpanRecord(
        name=name,
        span_id=span_id,
        parent_id=parent_id,
        kind="internal",
        began_ms=began_ms,
        ended_ms=max(began_ms, ended_ms),
        attributes=attributes,
    )


def _name(receipt: Receipt) -> str:
    operation = OPERATIONS.get(receipt.path)
    if operation is None:
        return "request"
    return f"{operation} {receipt.model}" if receipt.model else operation


def _error(receipt: Receipt) -> str | None:
    return None if receipt.status is Status.OK else receipt.failure_reason or receipt.status.value


def _of_request(receipt: Receipt) -> dict[str, Value]:
    return _known(
        {
            "gen_ai.operation.name": OPERATIONS.get(receipt.path),
            "gen_ai.provider.name": receipt.engine,
            "gen_ai.request.model": receipt.model,
            "gen_ai.conversation.id": receipt.session_id,
            "gen_ai.usage.input_tokens": receipt.prompt_tokens,
            "gen_ai.usage.output_tokens": receipt.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": receipt.actual_cached_tokens,
            "gen_ai.response.time_to_first_chunk": None if receipt.ttft_ms is None else receipt.ttft_ms / 1e3,
            "http.response.status_code": receipt.http_status,
            "kvrelay.request_id": receipt.request_id,
            "kvrelay.status": receipt.status.value,
            "kvrelay.fallback_reason": None if receipt.fallback_reason is None else receipt.fallback_reason.value,
        }
    )


def _of_decision(receipt: Receipt) -> dict[str, Value]:
    return _known(
        {
            "kvrelay.policy": receipt.policy,
            "kvrelay.route.reason": receipt.route_reason.value,
            "kvrelay.worker": receipt.chosen_worker,
            "kvrelay.candidates": receipt.candidates_total,
            "kvrelay.tokens.eligible": receipt.eligible_prefix_tokens,
            "kvrelay.tokens.claimed": receipt.matched_tokens_at_route,
        }
    )


def _known(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """What is not known is left out, never 0."""
    return {name: value for name, value in attributes.items() if value is not None}
