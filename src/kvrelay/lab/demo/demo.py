"""The whole story: one trace, some policies, every arm on mock workers of its own, one result."""

from __future__ import annotations

from pathlib import Path

from kvrelay.core.gates.evidence import Registration
from kvrelay.lab.arms.fleets import FreshMocks
from kvrelay.lab.arms.measure import Watcher, measure
from kvrelay.lab.arms.ranking import RULE
from kvrelay.lab.arms.ruling import Run, rule_on
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.trace_file import TraceFile


async def run_demo(source: TraceFile, settings: RunSettings, *, out: Path, watcher: Watcher) -> Run:
    """Measure, then rank by the rule that the manifest stated."""
    fleet = FreshMocks(settings.fleet, ready_timeout_s=settings.ready_timeout_s)
    measured = await measure(source, settings, fleet, rule=RULE, out=out, watcher=watcher)
    return Run(measured, rule_on(measured, out, Registration.NO_GATES))
