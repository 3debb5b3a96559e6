"""`kvrelay preflight`: what would spoil a comparison without any error."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.messages import replay as words

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: kvrelay preflight fleet.toml && kvrelay replay sessions.jsonl --fleet fleet.toml")
def preflight(
    fleet: Path = typer.Argument(..., help="TOML with [[workers]] and [model]."),
    json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Examine a fleet before a replay: a whole local snapshot, workers that are offline and hash alike.

    Exit 0: all is well; 1: something is not; 2: the file cannot be used; 3: something cannot be seen from here.
    """
    from kvrelay.cli.replay import standing_fleet
    from kvrelay.lab.arms.preflight import preflight as examine

    file, _, described = standing_fleet(fleet)
    findings = examine(file.model, described.workers)
    sys.stdout.write(msgspec.json.encode(findings).decode() + "\n" if json else words.preflight(findings))
    outcomes = {finding.outcome for finding in findings}
    if "fail" in outcomes:
        raise typer.Exit(messages.VERDICT_FAIL)
    if "unknown" in outcomes:
        raise typer.Exit(messages.UNKNOWN)
