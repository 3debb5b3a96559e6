"""`kvrelay gates`: is a gate file usable, and was it written before the run?"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.messages import replay as words
from kvrelay.cli.replay import load_gates

app = typer.Typer(
    cls=CommandGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None,
    help="Gates of a replay: written before it, locked, judged by.",
    epilog="Example: kvrelay gates lock gates.toml && kvrelay replay sessions.jsonl --gates gates.toml",
)  # fmt: skip

FILE = typer.Argument(..., help="TOML with [[gate]] tables.")
JSON = typer.Option(False, "--json", help="Print one JSON object on stdout.")


@app.command(epilog="Example: kvrelay gates check gates.toml --baseline kvrelay-replay")
def check(
    file: Path = FILE,
    baseline: Path | None = typer.Option(None, help="Folder of the run that the gates cite as `baseline_run`."),
    json: bool = JSON,
) -> None:
    """Read a gate file and say what it asks for and whether it is locked.

    Exit 0: usable and locked; 1: cites another baseline run; 2: not usable; 3: not locked, or changed since.
    """
    store = load_gates(file)
    if baseline is not None:
        _check_baseline(store.file.baseline_run, baseline)
    locked = store.lock is not None and store.lock.sha256 == store.file.digest
    if json:
        found = {"gates": msgspec.to_builtins(store.file), "lock": msgspec.to_builtins(store.lock), "locked": locked}
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        sys.stdout.write(words.gates_checked(file, store.file, store.lock))
    if not locked:
        raise typer.Exit(messages.UNKNOWN)


@app.command(epilog="Example: kvrelay gates lock gates.toml")
def lock(file: Path = FILE, json: bool = JSON) -> None:
    """Note the digest of a gate file and the time beside it, as FILE.lock. Exit 0: locked; 2: not usable."""
    from kvrelay.lab.arms.gate_store import lock_gates

    load_gates(file)
    try:
        found = lock_gates(file)
    except OSError as problem:
        messages.fail(words.unreadable("lock", problem.filename, problem.strerror or str(problem)))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n" if json else words.gates_locked(file, found))


def _check_baseline(cited: str, folder: Path) -> None:
    from kvrelay.lab.arms.run_folder import NoRun, read_manifest

    try:
        digest = read_manifest(folder).digest
    except NoRun as problem:
        messages.fail(words.no_run(str(problem)))
    if not digest.startswith(cited):
        messages.fail(words.not_this_baseline(cited, digest, folder), code=messages.VERDICT_FAIL)
