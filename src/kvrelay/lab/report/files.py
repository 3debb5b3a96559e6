"""What a run leaves in its folder, apart from the records that grow while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvrelay.lab.arms.ruling import Run
from kvrelay.lab.report.load_facts import cold_starts, sending_of
from kvrelay.lab.report.markdown import render_markdown
from kvrelay.lab.report.page import render_page
from kvrelay.lab.report.view import view_of


def summary(run: Run) -> dict[str, Any]:
    """The object that `--json` prints. `gates` is null for a run without them."""
    ruling, measured = run.ruling, run.measured
    return {
        "label": measured.manifest.stated.label,
        "verdict": msgspec.to_builtins(ruling.ranking),
        "gates": None if ruling.verdict is None else msgspec.to_builtins(ruling.verdict),
        "policies": msgspec.to_builtins(measured.results),
        "sending": msgspec.to_builtins(sending_of(measured)),
        "cold_starts": msgspec.to_builtins(cold_starts(measured)),
        "baseline": ruling.baseline,
        "paired": {
            policy: msgspec.to_builtins({"metrics": found.compared.metrics, "failures": found.compared.failures})
            for policy, found in ruling.comparisons.items()
        },
        "manifest": msgspec.to_builtins(measured.manifest),
    }


def write_files(run: Run, out: Path) -> None:
    view = view_of(run)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary(run)), indent=2) + b"\n")
    (out / "report.html").write_text(render_page(view), encoding="utf-8")
    (out / "report.md").write_text(render_markdown(view), encoding="utf-8")
