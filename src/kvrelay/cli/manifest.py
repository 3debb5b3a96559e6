"""`kvrelay manifest`: is what a run states whole, and may two runs be one set of results?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.messages import replay as words

app = typer.Typer(
    cls=CommandGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None,
    help="What a run was made of: check it, put two together.",
    epilog="Example: kvrelay manifest check kvrelay-replay",
)  # fmt: skip

WHERE = typer.Argument(..., metavar="DIR|FILE", help="Folder of a run, or its manifest.json.")


@app.command(epilog="Example: kvrelay manifest check kvrelay-replay")
def check(where: Path = WHERE, json: bool = typer.Option(False, "--json", help="Print the gaps as JSON.")) -> None:
    """Name everything that a manifest should say and does not. Exit 0: whole; 1: not; 2: no manifest there."""
    from kvrelay.lab.arms.manifest_check import gaps

    found = gaps(_load(where))
    if json:
        sys.stdout.write(msgspec.json.encode({"whole": not found, "gaps": found}).decode() + "\n")
    elif not found:
        sys.stdout.write(words.manifest_whole(where))
    if found:
        messages.fail(words.manifest_gaps(where, found), code=messages.VERDICT_FAIL)


@app.command(epilog="Example: kvrelay manifest merge monday tuesday > both.json")
def merge(left: Path = WHERE, right: Path = WHERE) -> None:
    """Put the arms of two runs of one stack into one object on stdout.

    Exit 0: done; 1: the stacks differ (engine, model, hardware, trace, plan, router, reset), or one is not whole.
    """
    from kvrelay.lab.arms.manifest_check import MergeRefused, merged

    try:
        found = merged(_load(left), _load(right))
    except MergeRefused as problem:
        messages.fail(words.merge_refused(problem.reasons), code=messages.VERDICT_FAIL)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


def _load(where: Path) -> dict[str, Any]:
    path = where / "manifest.json" if where.is_dir() else where
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as problem:
        messages.fail(words.no_run(f"{path}: {problem.strerror}"))
    except msgspec.DecodeError as problem:
        messages.fail(words.no_run(f"{path}: {problem}"))
