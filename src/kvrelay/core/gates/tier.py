"""Whether a tier may stay: better in full waiting time and in tasks, and no less reliable, than computing without it.

The rule is part of the program and not of a file, so nobody can bend it to a result: it is stated before any run.
"""

from __future__ import annotations

from enum import StrEnum

from kvrelay.core.gates.gate_file import Edges, Gate, GateFile, Limit, PairedLimit
from kvrelay.core.gates.judge import Outcome


class Decision(StrEnum):
    KEEP = "keep"
    DROP = "drop"
    UNKNOWN = "unknown"  # not shown to be better: it stays off until it is


DECISIONS = {Outcome.PASS: Decision.KEEP, Outcome.FAIL: Decision.DROP, Outcome.UNKNOWN: Decision.UNKNOWN}


def tier_gates(*, candidate: str, baseline: str) -> GateFile:
    """Times are from when a request was due to its first token: look-up, fetch, promotion, time-out and queue are in
    them. Failures and unfinished tasks are judged as well, by the two rules that nobody can leave out."""
    paired: tuple[tuple[str, str, str], ...] = (
        ("full TTFT is surely lower, request by request", "ttft_ms", "all"),
        ("in no bucket of prefix length and load it is surely higher", "ttft_ms", "no_bucket_worse"),
        ("sessions do not surely end later", "session_wall_ms", "no_bucket_worse"),
        ("in no bucket more requests fail", "failures", "every_bucket"),
    )
    gates = (
        *(Gate(says, PairedLimit(metric, 1.0, over)) for says, metric, over in paired),
        Gate("its tail is no longer", Limit("ttft_p95_ms", 1.0, at_most=True, ratio=True)),
    )
    return GateFile(
        title=f"keep what `{candidate}` has beyond `{baseline}`",
        candidate=candidate,
        baseline=baseline,
        baseline_run="this-run",
        gates=gates,
        edges=Edges(),
        digest="built-in",
    )
