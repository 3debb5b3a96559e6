"""The whole story: one trace, some policies, every arm on mock workers of its own, one result."""

from __future__ import annotations

from pathlib import Path

from kvrelay.lab.arms.fleets import FreshMocks
from kvrelay.lab.arms.measure import Watcher
from kvrelay.lab.arms.ruling import Run
from kvrelay.lab.arms.run import run
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.trace_file import TraceFile


async def run_demo(source: TraceFile, settings: RunSettings, *, out: Path, watcher: Watcher) -> Run:
    fleet = FreshMocks(settings.fleet, ready_timeout_s=settings.ready_timeout_s)
    return await run(source, settings, fleet, out=out, watcher=watcher)
