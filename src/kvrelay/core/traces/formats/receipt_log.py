"""Our own route receipts as a trace: what was asked when, and how long the answers were.

A receipt holds no block ids, so what prompts shared is not in this trace; times and lengths are exact.
"""

from __future__ import annotations

import msgspec

from kvrelay.core.traces.formats.options import ImportOptions, Lines, empty_file
from kvrelay.core.traces.formats.rows import Row, json_lines, trace_of
from kvrelay.core.traces.trace import Trace


class _Receipt(msgspec.Struct):
    """The members of `core/receipts/receipt.py` that a trace needs."""

    request_id: str
    session_id: str | None = None
    arrived_ms: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    e2e_ms: float | None = None


def looks_like(first: bytes) -> bool:
    return b'"route_reason"' in first and b'"request_id"' in first


def read(lines: Lines, options: ImportOptions = ImportOptions()) -> Trace:
    """Think time is the pause between the end of an answer and the session's next request."""
    receipts = list(json_lines(lines, _Receipt, "receipts as `kvrelay serve` writes them"))
    rows, ended_ms = [], dict[str, float]()
    for line, receipt in sorted(receipts, key=lambda numbered: numbered[1].arrived_ms or 0.0):
        if receipt.arrived_ms is None or receipt.prompt_tokens is None:
            continue
        think_ms, session = 0.0, receipt.session_id
        if session is not None:
            think_ms = max(0.0, receipt.arrived_ms - ended_ms.get(session, receipt.arrived_ms))
            ended_ms[session] = receipt.arrived_ms + (receipt.e2e_ms or 0.0)
        completion = receipt.completion_tokens or 0
        rows.append(Row(line, receipt.arrived_ms, receipt.prompt_tokens, completion, None, session, round(think_ms, 3)))
    if not rows:
        raise empty_file("receipts with `arrived_ms` and `prompt_tokens`")
    left_out = len(receipts) - len(rows)
    notices = [f"{left_out} receipts without a time or token count are left out."] if left_out else []
    return trace_of(rows, options, notices)
