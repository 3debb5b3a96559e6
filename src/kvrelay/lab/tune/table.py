"""The sweep as people and programs read it: weight vector x SLO."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.lab.arms.results import hit_ratio
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.report.table import Table, milliseconds, percent, times, tokens
from kvrelay.lab.tune.sweep import Sweep

HEADER = (
    "alpha,beta,gamma,delta", "SLO", "failed", "TTFT p50 ms", "TTFT p95 ms", "actual hit tokens", "hit rate",
    "busiest / mean load",
)  # fmt: skip
WORDS = {True: "pass", False: "fail", None: "unknown"}


def sweep_table(sweep: Sweep) -> Table:
    rows = [
        (
            f"{name} (pick)" if name == sweep.pick else name,
            WORDS[sweep.passed[name]],
            str(result.failures),
            milliseconds(result.ttft_ms.p50),
            milliseconds(result.ttft_ms.p95),
            tokens(result.actual_cached_tokens),
            percent(hit_ratio(result)),
            times(result.max_over_mean_load),
        )
        for name, result in sweep.measured.results.items()
    ]
    return Table(HEADER, tuple(rows), emphasis=tuple(name == sweep.pick for name in sweep.passed))


def tune_summary(sweep: Sweep) -> dict[str, Any]:
    """The object that `--json` prints."""
    settings = sweep.measured.manifest.stated.settings
    return {
        "label": sweep.measured.manifest.stated.label,
        "slo": msgspec.to_builtins(sweep.slo),
        "rule": sweep.slo.rule(),
        "pick": None if sweep.pick is None else _weights(settings, sweep.pick),
        "vectors": {
            name: {
                "weights": _weights(settings, name),
                "slo": WORDS[sweep.passed[name]],
                **msgspec.to_builtins(result),
            }
            for name, result in sweep.measured.results.items()
        },
        "manifest": msgspec.to_builtins(sweep.measured.manifest),
    }


def _weights(settings: RunSettings, name: str) -> dict[str, Any]:
    prefix = "policy.cache_load."
    sets = settings.contender(name).sets
    return {key.removeprefix(prefix): value for key, value in sets.items() if key.startswith(prefix)}
