"""`kvrelay report`: the report of a run that is on disk, made anew from its raw records."""

from __future__ import annotations

from pathlib import Path

import typer

from kvrelay.cli import messages
from kvrelay.cli.messages import replay as words

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: kvrelay report kvrelay-replay --json")
def report(
    folder: Path = typer.Argument(..., metavar="DIR", help="Folder of a replay or demo."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object on stdout."),
) -> None:
    """Count, compare and judge a run again, and write report.html, report.md and summary.json into its folder.

    Exit 0: pass (or no gates); 1: fail; 2: no run there; 3: unknown or insufficient evidence.
    """
    from kvrelay.cli.replay import end_by, show
    from kvrelay.lab.arms.run import read_back
    from kvrelay.lab.arms.run_folder import NoRun

    try:
        done = read_back(folder)
    except NoRun as problem:
        messages.fail(words.no_run(str(problem)))
    show(done, folder, as_json=json)
    end_by(done)
