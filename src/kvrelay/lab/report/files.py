"""What a run leaves in its folder, apart from the samples and the manifest that grow while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.settings import LABEL
from kvrelay.lab.demo.demo import DemoRun
from kvrelay.lab.report.page import render_page
from kvrelay.lab.report.view import view_of


def summary(run: DemoRun) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "label": LABEL,
        "verdict": msgspec.to_builtins(run.verdict),
        "policies": msgspec.to_builtins(run.measured.results),
        "manifest": msgspec.to_builtins(run.measured.manifest),
    }


def write_files(run: DemoRun, out: Path) -> None:
    write_receipts(run.measured, out)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary(run)), indent=2) + b"\n")
    (out / "report.html").write_text(render_page(view_of(run)), encoding="utf-8")


def write_receipts(measured: Measured, out: Path) -> None:
    """All arms' receipts in one file, each with the digest of the manifest beside it."""
    lines = [msgspec.json.encode(receipt) + b"\n" for receipt in measured.receipts()]
    (out / "receipts.jsonl").write_bytes(b"".join(lines))
