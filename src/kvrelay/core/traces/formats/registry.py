"""The formats by name, and which of them a file has."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.core.traces.formats import (
    azure,
    bailian,
    burstgpt,
    delta,
    mooncake,
    native,
    receipt_log,
    request_log,
    tracelab,
    weka,
)
from kvrelay.core.traces.formats.options import ImportOptions, Lines, Written
from kvrelay.core.traces.trace import Trace, TraceError


class Format(Struct, frozen=True):
    """`write` is None where an export would have to invent what was measured or said."""

    summary: str
    looks_like: Callable[[bytes], bool]
    read: Callable[[Lines, ImportOptions], Trace]
    write: Callable[[Trace], Written] | None = None


def _read_new_tokens(lines: Lines, options: ImportOptions) -> Trace:
    """Who names this format has told what the rows hold."""
    return mooncake.read(lines, replace(options, rows=options.rows or "delta"))


# In the order in which a file is asked: the special ones before those with members that others have, too.
FORMATS: dict[str, Format] = {
    "kvrelay": Format("our own, loses nothing", native.looks_like, native.read, native.write),
    "weka": Format("agent sessions with sub-agents", weka.looks_like, weka.read, weka.write),
    "tracelab": Format("rounds of coding agents", tracelab.looks_like, tracelab.read),
    "receipts": Format("our own receipts", receipt_log.looks_like, receipt_log.read),
    "bailian": Format("chats with their parents", bailian.looks_like, bailian.read, bailian.write),
    "mooncake": Format("rows with hash_ids, cumulative", mooncake.looks_like, mooncake.read, mooncake.write),
    "aiperf": Format("multi-turn rows, only new tokens", lambda _: False, _read_new_tokens, delta.write),
    "requests": Format("logged OpenAI requests, hashed", request_log.looks_like, request_log.read),
    "azure": Format("CSV of times and lengths", azure.looks_like, azure.read, azure.write),
    "burstgpt": Format("CSV of times and lengths", burstgpt.looks_like, burstgpt.read, burstgpt.write),
}


def format_of(first: bytes) -> str:
    """By the first line that is not blank. Mooncake's and AIPerf's rows look alike; their reader tells them apart."""
    for name, known in FORMATS.items():
        if known.looks_like(first):
            return name
    found = "none of the known formats" if first.strip() else "an empty file"
    raise TraceError(1, found, "one of " + ", ".join(f"{name} ({one.summary})" for name, one in FORMATS.items()))
