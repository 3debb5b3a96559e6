"""A whole run: measured, ruled on by what was stated beforehand, on disk."""

from __future__ import annotations

from pathlib import Path

from kvrelay.lab.arms.fleets import ArmFleet
from kvrelay.lab.arms.gate_store import GateStore, registration_of
from kvrelay.lab.arms.measure import Watcher, measure
from kvrelay.lab.arms.ranking import RULE
from kvrelay.lab.arms.ruling import Run, rule_on
from kvrelay.lab.arms.run_folder import read_kept_gates, read_run
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.trace_file import TraceFile


async def run(
    source: TraceFile,
    settings: RunSettings,
    fleet: ArmFleet,
    *,
    out: Path,
    watcher: Watcher,
    gates: GateStore | None = None,
) -> Run:
    """Raises what `measure` raises."""
    rule = RULE if gates is None else f"gates {gates.file.digest}; without them: {RULE}"
    measured = await measure(source, settings, fleet, rule=rule, out=out, watcher=watcher, gates=gates)
    return Run(measured, rule_on(measured, out, registration_of(measured.manifest, gates)))


def read_back(folder: Path) -> Run:
    """A run from its folder, ruled on anew: nothing of an earlier report is believed. Raises NoRun."""
    measured = read_run(folder)
    kept = read_kept_gates(folder)
    return Run(measured, rule_on(measured, folder, registration_of(measured.manifest, kept)))
