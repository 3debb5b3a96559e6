"""What a run leaves in its folder, apart from the samples and the manifest that grow while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvrelay.lab.arms.ruling import Run
from kvrelay.lab.report.page import render_page
from kvrelay.lab.report.view import view_of


def summary(run: Run) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "label": run.measured.manifest.stated.label,
        "verdict": msgspec.to_builtins(run.ruling.ranking),
        "policies": msgspec.to_builtins(run.measured.results),
        "manifest": msgspec.to_builtins(run.measured.manifest),
    }


def write_files(run: Run, out: Path) -> None:
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary(run)), indent=2) + b"\n")
    (out / "report.html").write_text(render_page(view_of(run)), encoding="utf-8")
