"""The whole story: one trace, some policies, every arm on its own fleet, one result."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from kvrelay.lab.arms.measure import Measured, Watcher, measure
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.demo.verdict import RULE, Verdict, judge
from kvrelay.lab.replay.trace_file import TraceFile


class DemoRun(Struct, frozen=True, eq=False):
    measured: Measured
    verdict: Verdict


async def run_demo(source: TraceFile, settings: RunSettings, *, out: Path, watcher: Watcher) -> DemoRun:
    """Measure, then judge by the rule that the manifest stated."""
    measured = await measure(source, settings, rule=RULE, out=out, watcher=watcher)
    return DemoRun(measured, judge(measured.results))
