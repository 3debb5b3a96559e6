"""Contexts in, contexts on, and a receipt as a tree of spans."""

from __future__ import annotations

import itertools
import random

import pytest

from kvrelay.core.model.units import Fault, RouteReason, Status
from kvrelay.core.receipts.receipt import Attempt, Receipt
from kvrelay.edge.observe.tracing.context import Parent, Trace, parent_of, traceparent_line, without_parent
from kvrelay.edge.observe.tracing.spans import SpanRecord, spans_of
from kvrelay.edge.observe.tracing.tracing import Sending, Tracing
from tests.edge.observe.samples import receipt

CONTEXT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def header(name: bytes, value: bytes) -> list[bytes]:
    return [name, b": ", value, b"\r\n"]


ACCEPT, STATE = header(b"accept", b"*/*"), header(b"tracestate", b"a=1")
PARTS = [*ACCEPT, *header(b"Traceparent", CONTEXT), *STATE]


@pytest.mark.parametrize(
    ("value", "parent"),
    [
        (CONTEXT, Parent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)),
        (CONTEXT[:-1] + b"0", Parent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False)),
        (b"cc" + CONTEXT[2:] + b"-later", Parent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)),
        (b"ff" + CONTEXT[2:], None),
        (CONTEXT.upper(), None),
        (b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01", None),
        (b"00-0af7651916cd43dd8448eb211c80319c-" + b"0" * 16 + b"-01", None),
        (b"", None),
    ],
)
def test_a_context_is_read_as_w3c_writes_it_or_is_none(value: bytes, parent: Parent | None) -> None:
    assert parent_of(header(b"traceparent", value)) == parent
    assert parent_of([]) is None


def test_only_our_own_line_replaces_the_clients() -> None:
    assert without_parent(PARTS) == [*ACCEPT, *STATE]
    assert told(traceparent_line(7, 9)) == Parent(7, 9, True)


def told(line: bytes) -> Parent | None:
    name, _, value = line.partition(b": ")
    return parent_of(header(name, value))


class Sink:
    def __init__(self) -> None:
        self.sent: list[Sending] = []

    def send(self, sending: Sending) -> None:
        self.sent.append(sending)

    def close(self) -> None:
        return


def tracing(sink: Sink, ratio: float = 0.0, *, follow_parent: bool = True) -> Tracing:
    return Tracing(
        sink,
        sample_ratio=ratio,
        follow_parent=follow_parent,
        now_ms=lambda: 1100.0,
        wall_ns=lambda: 5_000_000_000,
        chance=random.Random(1),
    )


def test_a_client_that_samples_is_followed_and_one_that_does_not_is_left_as_it_is() -> None:
    sink = Sink()
    traces = tracing(sink)
    parts, own = traces.onward("r-1", 1, PARTS)
    parent = told(own)
    assert parent is not None and parent.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert parts == [*ACCEPT, *STATE]
    traces.finish(receipt("r-1", arrived_ms=1000.0))
    (sending,) = sink.sent
    assert sending.arrived_ns == 5_000_000_000 - 100_000_000
    assert parent.span_id in {span.span_id for span in sending.spans}, "the worker's parent is the attempt"
    quiet = header(b"traceparent", CONTEXT[:-1] + b"0")
    assert traces.onward("r-2", 1, quiet) == (quiet, b"")
    traces.finish(receipt("r-2"))
    assert len(sink.sent) == 1


def test_the_ratio_decides_where_nobody_did_and_where_clients_may_not() -> None:
    assert tracing(Sink(), 0.0).onward("r", 1, []) == ([], b"")
    assert tracing(Sink(), 0.0, follow_parent=False).onward("r", 1, PARTS) == (PARTS, b"")
    assert tracing(Sink(), 1.0).onward("r", 1, [])[1].startswith(b"traceparent: 00-")
    sampled = sum(bool(traces.onward(f"r{at}", 1, [])[1]) for traces in [tracing(Sink(), 0.1)] for at in range(5000))
    assert 380 <= sampled <= 620


def test_an_attempt_after_one_that_was_not_traced_is_not_traced_either() -> None:
    traces = tracing(Sink(), 1.0)
    assert traces.onward("r", 2, PARTS) == (PARTS, b"")


def tree(one: Receipt, trace: Trace) -> dict[str, SpanRecord]:
    ids = itertools.count(100)
    return {span.name: span for span in spans_of(one, trace, lambda: next(ids))}


RETRIED = receipt(
    attempts=(
        Attempt(1, "A", "1", 0, RouteReason.CACHE_PLUS_LOAD, 5.0, Fault.RESET),
        Attempt(2, "B", "1", 0, RouteReason.CACHE_SPILL, 9.0, http_status=200),
    ),
    router_queue_ms=3.0,
    decision_us=500.0,
    remote_path_ms={"fetch": 4.0, "copy": 2.0},
    remote_bytes_read=4096,
    ttft_ms=30.0,
    e2e_ms=80.0,
)


def test_a_receipt_becomes_gateway_queue_decision_attempts_fetch_and_worker() -> None:
    spans = tree(RETRIED, Trace(1, 2, Parent(1, 3, True), {1: 11, 2: 12}))
    times = {name: (span.parent_id, span.began_ms, span.ended_ms) for name, span in spans.items()}
    assert times == {
        "text_completion m": (3, 0.0, 80.0),
        "queue": (2, 1.5, 4.5),
        "decide": (2, 4.5, 5.0),
        "attempt 1": (2, 5.0, 9.0),
        "attempt 2": (2, 9.0, 80.0),
        "store fetch: fetch": (12, 9.0, 13.0),
        "store fetch: copy": (12, 13.0, 15.0),
        "worker: to first token": (12, 15.0, 30.0),
        "worker: generate": (12, 30.0, 80.0),
    }
    assert (spans["attempt 1"].error, spans["attempt 2"].error) == ("reset", None)
    assert spans["text_completion m"].attributes["gen_ai.usage.cache_read.input_tokens"] == 1216
    assert spans["decide"].attributes["kvrelay.tokens.claimed"] == 1280


def test_what_is_not_known_is_no_attribute_and_a_failure_names_its_reason() -> None:
    nothing = {"attempts": (), "actual_cached_tokens": None, "ttft_ms": None}
    lost = receipt(status=Status.WORKER_LOST, failure_reason="reset", **nothing)
    root = tree(lost, Trace(1, 2, None, {}))["text_completion m"]
    assert root.error == "reset" and root.parent_id is None
    assert "gen_ai.usage.cache_read.input_tokens" not in root.attributes
    assert "gen_ai.response.time_to_first_chunk" not in root.attributes
