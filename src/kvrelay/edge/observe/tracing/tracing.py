"""Decides which requests are traced, gives their attempts a context, and sends their spans when they have ended.

Off unless `tracing.endpoint` is set; then most requests cost one draw. Spans leave in batches from a thread of the
OpenTelemetry library, whose queue is bounded: a collector that does not keep up loses spans, never requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.observe.tracing.context import Parent, Trace, parent_of, traceparent_line, without_parent
from kvrelay.edge.observe.tracing.spans import SpanRecord, spans_of

if TYPE_CHECKING:
    from kvrelay.edge.system.sections import TracingSection

FLUSH_MS = 3000


class Sending(Struct, frozen=True):
    """Spans of one trace, and the wall time in nanoseconds at which its request arrived."""

    trace: Trace
    spans: tuple[SpanRecord, ...]
    arrived_ns: int


class SpanSink(Protocol):
    def send(self, sending: Sending) -> None: ...

    def close(self) -> None:
        """Sends what is left; may take a few seconds."""
        ...


class Tracing:
    """`now_ms` is the clock of receipts, `wall_ns` that of collectors."""

    def __init__(
        self,
        sink: SpanSink,
        *,
        sample_ratio: float,
        follow_parent: bool,
        now_ms: Callable[[], float],
        wall_ns: Callable[[], int],
        chance: random.Random,
    ) -> None:
        self._sink = sink
        self._sample_ratio = sample_ratio
        self._follow_parent = follow_parent
        self._now_ms = now_ms
        self._wall_ns = wall_ns
        self._chance = chance
        self._open: dict[str, Trace] = {}

    def onward(self, request_id: str, attempt: int, parts: Sequence[bytes]) -> tuple[Sequence[bytes], bytes]:
        """Before an attempt is sent: the client's headers that go with it (see `parent_of`), and a line of ours.

        A request that is not traced keeps its client's context as it came.
        """
        trace = self._open.get(request_id)
        if trace is None:
            if attempt > 1:
                return parts, b""  # not drawn when it began
            parent = parent_of(parts)
            if not self._is_sampled(parent):
                return parts, b""
            trace_id = self._chance.getrandbits(128) if parent is None else parent.trace_id
            trace = self._open[request_id] = Trace(trace_id or 1, self._new_id(), parent, {})
        span_id = trace.attempts[attempt] = self._new_id()
        return without_parent(parts), traceparent_line(trace.trace_id, span_id)

    def finish(self, receipt: Receipt) -> None:
        trace = self._open.pop(receipt.request_id, None)
        if trace is None or receipt.arrived_ms is None:
            return
        spans = tuple(spans_of(receipt, trace, self._new_id))
        arrived_ns = self._wall_ns() - round((self._now_ms() - receipt.arrived_ms) * 1e6)
        self._sink.send(Sending(trace, spans, arrived_ns))

    def close(self) -> None:
        self._sink.close()

    def _is_sampled(self, parent: Parent | None) -> bool:
        if parent is not None and self._follow_parent:
            return parent.sampled
        return self._chance.random() < self._sample_ratio

    def _new_id(self) -> int:
        return self._chance.getrandbits(64) or 1


class OtlpSink:
    """OTLP over HTTP. Raises ImportError where the extra `otel` is not installed."""

    def __init__(self, endpoint: str, *, version: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._processor: Any = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=FLUSH_MS / 1e3))
        self._resource = Resource.create({"service.name": "kvrelay", "service.version": version})
        self._scope = InstrumentationScope("kvrelay", version)

    def send(self, sending: Sending) -> None:
        for span in sending.spans:
            self._processor.on_end(self._readable(sending, span))

    def close(self) -> None:
        self._processor.force_flush(FLUSH_MS)
        self._processor.shutdown()

    def _readable(self, sending: Sending, span: SpanRecord) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: int, *, remote: bool) -> SpanContext:
            return SpanContext(sending.trace.trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))

        is_root = span.span_id == sending.trace.span_id
        error = {} if span.error is None else {"error.type": span.error}
        return ReadableSpan(
            name=span.name,
            context=context(span.span_id, remote=False),
            parent=None if span.parent_id is None else context(span.parent_id, remote=is_root),
            resource=self._resource,
            attributes={**span.attributes, **error},
            kind={"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}[span.kind],
            status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR),
            start_time=sending.arrived_ns + round(span.began_ms * 1e6),
            end_time=sending.arrived_ns + round(span.ended_ms * 1e6),
            instrumentation_scope=self._scope,
        )


def tracing_of(
    section: TracingSection,
    *,
    version: str,
    now_ms: Callable[[], float],
    wall_ns: Callable[[], int],
    chance: random.Random,
) -> Tracing | None:
    """As configured; None where tracing is off. Raises ValueError where the extra is missing."""
    if section.endpoint is None:
        return None
    try:
        sink = OtlpSink(section.endpoint, version=version)
    except ImportError as problem:
        raise ValueError(
            f"`tracing.endpoint` is set, and {problem.name} is not installed: pip install 'kvrelay[otel]'"
        ) from problem
    return Tracing(
        sink,
        sample_ratio=section.sample_ratio,
        follow_parent=section.follow_parent,
        now_ms=now_ms,
        wall_ns=wall_ns,
        chance=chance,
    )
