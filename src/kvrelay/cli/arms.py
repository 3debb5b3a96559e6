"""`kvrelay arms`: do two arms differ in one thing only, and would the contenders of a plan?"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.messages import replay as words

app = typer.Typer(
    cls=CommandGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None,
    help="One causal variable at a time: compare configurations, check a plan.",
    epilog="Example: kvrelay arms diff kvrelay-replay/arms/sticky-0 kvrelay-replay/arms/cache_load-0",
)  # fmt: skip

CONFIG = typer.Argument(..., metavar="DIR|FILE", help="Folder of an arm, or its gateway.toml.")


@app.command(epilog="Example: kvrelay arms diff arms/sticky-0 arms/cache_load-0")
def diff(
    left: Path = CONFIG,
    right: Path = CONFIG,
    factor: str = typer.Option("router", help="The one factor in which they may differ."),
    json: bool = typer.Option(False, "--json", help="Print the differences as JSON."),
) -> None:
    """Show in which keys two arms differ, ports and files aside.

    Exit 0: only in the factor, or not at all; 1: in another key; 2: a file cannot be read.
    """
    from kvrelay.lab.arms.contender import differences

    found = differences(_load(left), _load(right))
    if json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    elif found:
        sys.stdout.write("".join(f"{words.difference(one)}\n" for one in found))
    else:
        sys.stdout.write(words.no_difference())
    others = [one.key for one in found if one.factor != factor]
    if others:
        messages.fail(words.more_than_policy(others), code=messages.VERDICT_FAIL)


@app.command(epilog="Example: kvrelay arms check contenders.toml")
def check(file: Path = typer.Argument(..., help="TOML with [[contender]] tables in the order of the steps.")) -> None:
    """Check that neighbours in a plan differ in exactly one factor. Exit 0: they do; 1: not; 2: no plan."""
    from kvrelay.lab.arms.contender import plan_problems
    from kvrelay.lab.arms.contender_file import ContenderFileError, read_contenders

    try:
        problems = plan_problems(read_contenders(file))
    except OSError as problem:
        messages.fail(words.unreadable("arms", file, problem.strerror or str(problem)))
    except ContenderFileError as problem:
        messages.fail(words.not_legal("arms", file, problem.found, problem.legal))
    if problems:
        messages.fail("\n".join(words.plan_refused(problem) for problem in problems), code=messages.VERDICT_FAIL)


def _load(where: Path) -> dict[str, Any]:
    from kvrelay.lab.arms.contender import read_flat

    path = where / "gateway.toml" if where.is_dir() else where
    try:
        return read_flat(path)
    except OSError as problem:
        messages.fail(words.unreadable("configuration", path, problem.strerror or str(problem)))
    except tomllib.TOMLDecodeError as problem:
        messages.fail(words.not_legal("configuration", path, str(problem), "TOML"))
