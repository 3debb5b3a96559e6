"""Whether a tier may stay: better in full waiting time and in tasks, and no less reliable, than computing without it.

The rule is part of the program and not of a file, so nobody can bend it to a result: it is stated before any run.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import structs

from kvrelay.core.gates.gate_file import Edges, Gate, GateFile, PairedLimit
from kvrelay.core.gates.judge import Compared, Outcome
from kvrelay.core.stats.paired import Comparison


class Decision(StrEnum):
    KEEP = "keep"
    DROP = "drop"
    UNKNOWN = "unknown"  # not shown to be better: it stays off until it is


TAIL = "ttft_p95_ms"
"""The ratio of the two arms' 95th percentiles, as one more paired metric with one bucket (`with_tail`)."""

DECISIONS = {Outcome.PASS: Decision.KEEP, Outcome.FAIL: Decision.DROP, Outcome.UNKNOWN: Decision.UNKNOWN}


def with_tail(compared: Compared) -> Compared:
    """The same, and the tail of `ttft_ms` as a metric that gates can be put to."""
    tail = compared.metrics["ttft_ms"].p95_ratio
    metrics = {**compared.metrics, TAIL: Comparison(tail, tail, {"p95 of all requests": tail})}
    return structs.replace(compared, metrics=metrics)


def tier_gates(*, candidate: str, baseline: str) -> GateFile:
    """Times are from when a request was due to its first token: look-up, fetch, promotion, time-out and queue are in
    them. Failures and unfinished tasks are judged as well, by the two rules that nobody can leave out."""
    paired: tuple[tuple[str, str, str], ...] = (
        ("full TTFT is surely lower, request by request", "ttft_ms", "all"),
        ("in no bucket of prefix length and load it is surely higher", "ttft_ms", "no_bucket_worse"),
        ("its tail is not surely longer", TAIL, "no_bucket_worse"),
        ("sessions do not surely end later", "session_wall_ms", "no_bucket_worse"),
        ("in no bucket more requests fail", "failures", "every_bucket"),
    )
    gates = tuple(Gate(says, PairedLimit(metric, 1.0, over)) for says, metric, over in paired)
    return GateFile(
        title=f"keep what `{candidate}` has beyond `{baseline}`",
        candidate=candidate,
        baseline=baseline,
        baseline_run="this-run",
        gates=gates,
        edges=Edges(),
        digest="built-in",
    )
