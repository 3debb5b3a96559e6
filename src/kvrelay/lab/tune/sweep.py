"""The sweep: every weight vector is an arm of the demo, judged against one SLO; the pick follows from the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvrelay.lab.arms.contender import Contender, Weights
from kvrelay.lab.arms.fleets import FreshMocks
from kvrelay.lab.arms.measure import Measured, Watcher, measure
from kvrelay.lab.arms.results import PolicyResult
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.trace_file import TraceFile

# From "cache only" to "load only", with the defaults in between.
DEFAULT_VECTORS = (
    Weights(alpha=1.0, beta=0.0, gamma=0.0, delta=0.0),
    Weights(alpha=1.0, beta=0.002, gamma=0.005, delta=0.05),
    Weights(alpha=1.0, beta=0.02, gamma=0.05, delta=0.05),
    Weights(alpha=1.0, beta=0.1, gamma=0.25, delta=0.05),
    Weights(alpha=0.0, beta=0.02, gamma=0.05, delta=0.05),
)


class Slo(Struct, frozen=True):
    """What has to hold, of modelled times on mock workers."""

    ttft_p95_ms: float
    max_failures: int = 0

    def rule(self) -> str:
        return (
            f"pass: at most {self.max_failures} failures and p95 time to first token at most {self.ttft_p95_ms:g} ms; "
            "pick: of those that pass, the most actual hit tokens, then the lowest p95, then the first in the list"
        )

    def passed_by(self, result: PolicyResult) -> bool | None:
        """None: unknown, because nothing was answered."""
        if result.ttft_ms.p95 is None:
            return None
        return result.failures <= self.max_failures and result.ttft_ms.p95 <= self.ttft_p95_ms


class Sweep(Struct, frozen=True, eq=False):
    """`pick` is null when no vector passes."""

    measured: Measured
    slo: Slo
    passed: dict[str, bool | None]
    pick: str | None


async def run_sweep(
    source: TraceFile, settings: RunSettings, vectors: Sequence[Weights], slo: Slo, *, out: Path, watcher: Watcher
) -> Sweep:
    """The same replay for every vector; SLO and rule are in the manifest before the first arm."""
    settings = msgspec.structs.replace(settings, contenders=tuple(map(Contender.of_weights, vectors)))
    fleet = FreshMocks(settings.fleet, ready_timeout_s=settings.ready_timeout_s)
    measured = await measure(source, settings, fleet, rule=slo.rule(), out=out, watcher=watcher)
    passed = {name: slo.passed_by(result) for name, result in measured.results.items()}
    return Sweep(measured, slo, passed, pick(measured.results, slo))


def pick(results: Mapping[str, PolicyResult], slo: Slo) -> str | None:
    """By the rule of `Slo.rule`; `results` are in the order of the list."""
    passing = [(name, result) for name, result in results.items() if slo.passed_by(result)]
    best = min(passing, key=lambda item: _rank(item[1]), default=None)
    return None if best is None else best[0]


def _rank(result: PolicyResult) -> tuple[int, float]:
    assert result.ttft_ms.p95 is not None
    return (-(result.actual_cached_tokens or 0), result.ttft_ms.p95)
