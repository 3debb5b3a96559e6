"""The sweep as people and programs read it: weight vector x SLO, and what the held-out half says of the pick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvrelay.lab.arms.results import PolicyResult, hit_ratio
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.report.table import Table, milliseconds, percent, times, tokens
from kvrelay.lab.tune.sweep import Sweep

HEADER = (
    "alpha,beta,gamma,delta", "outcome", "failed", "TTFT p50 ms", "TTFT p95 ms", "actual hit tokens", "hit rate",
    "busiest / mean load",
)  # fmt: skip
WORDS = {True: "pass", False: "fail", None: "unknown"}
CONTROL_WORD = "control"


def sweep_table(sweep: Sweep) -> Table:
    """Of the training half; the control has no outcome."""
    return _table(sweep.measured.results, sweep.passed, sweep.pick)


def held_out_table(sweep: Sweep) -> Table:
    """Of the half that the pick had never seen."""
    assert sweep.held_out is not None and sweep.candidate is not None
    return _table(sweep.held_out.measured.results, {sweep.candidate: sweep.confirmed}, sweep.candidate)


def tune_summary(sweep: Sweep) -> dict[str, Any]:
    """The object that `--json` prints. `held_out` is null when nothing was picked."""
    stated = sweep.measured.manifest.stated
    run = sweep.held_out
    return {
        "label": stated.label,
        "rule": sweep.rule,
        "pick": None if sweep.pick is None else _weights(stated.settings, sweep.pick),
        "confirmed": None if sweep.pick is None else WORDS[sweep.confirmed],
        "vectors": {
            name: {
                "weights": _weights(stated.settings, name),
                "outcome": WORDS[passed],
                **msgspec.to_builtins(sweep.measured.results[name]),
            }
            for name, passed in sweep.passed.items()
        },
        "held_out": None
        if run is None
        else {
            "policies": msgspec.to_builtins(run.measured.results),
            "gates": None if run.ruling.verdict is None else msgspec.to_builtins(run.ruling.verdict),
        },
        "manifest": msgspec.to_builtins(sweep.measured.manifest),
    }


def _table(results: Mapping[str, PolicyResult], outcomes: Mapping[str, bool | None], pick: str | None) -> Table:
    rows = [
        (
            f"{name} (pick)" if name == pick else name,
            WORDS[outcomes[name]] if name in outcomes else CONTROL_WORD,
            str(result.failures),
            milliseconds(result.ttft_ms.p50),
            milliseconds(result.ttft_ms.p95),
            tokens(result.actual_cached_tokens),
            percent(hit_ratio(result)),
            times(result.max_over_mean_load),
        )
        for name, result in results.items()
    ]
    return Table(HEADER, tuple(rows), emphasis=tuple(name == pick for name in results))


def _weights(settings: RunSettings, name: str) -> dict[str, Any]:
    prefix = "policy.cache_load."
    sets = settings.contender(name).sets
    return {key.removeprefix(prefix): value for key, value in sets.items() if key.startswith(prefix)}
