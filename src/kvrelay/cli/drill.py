"""`kvrelay drill`: failure drills with a verdict, and random attacks on whole simulated fleets."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.reporting import EXIT_OF_VERDICT

if TYPE_CHECKING:
    from kvrelay.lab.drills.drill import Drill
    from kvrelay.lab.drills.fleets.base import Fleet
    from kvrelay.lab.drills.run import DrillResult

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Failure drills: something is sent, something is broken, and what must hold is judged.",
)

ALL = "all"
SIMULATED, MOCK = "simulated", "mock"  # made anew for every drill; all others are somebody's
_AFRESH_BITS = 32


@app.callback()
def drill() -> None:
    """Exit 0: everything held; 1: something did not; 3: something could not be observed."""


@app.command(name="list", epilog="Example: kvrelay drill list", short_help="Name all drills.")
def list_drills(
    json: Annotated[bool, typer.Option("--json", help="One JSON array on stdout.")] = False,
) -> None:
    """Every drill with what it breaks."""
    from kvrelay.lab.drills.catalog import ALL as drills

    if json:
        listed = [
            {"name": each.name, "title": each.title, "breaks": each.breaks, "group": each.group, "covers": each.covers}
            for each in drills.values()
        ]
        sys.stdout.write(msgspec.json.encode(listed).decode() + "\n")
        return
    widest = max(map(len, drills))
    for each in drills.values():
        sys.stdout.write(f"{each.name:{widest}}  {each.title}\n")


@app.command(epilog="Example: kvrelay drill run worker-loss --fleet mock --out drills", short_help="Run drills.")
def run(
    names: Annotated[list[str], typer.Argument(metavar="NAME...|all", help="Which drills; `all` for every one.")],
    fleet: Annotated[
        str, typer.Option(metavar="simulated|mock|FILE", help="Virtual time, mock processes, or a fleet of your own.")
    ] = SIMULATED,
    router_command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Another router before the mock workers; {port} and {workers} are set."),
    ] = None,
    confirm: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKER=PID|UID", help="With --fleet FILE: this target is staging and may be broken."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of a simulated fleet's draws.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A runbook page with evidence for each drill.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line per drill on stdout.")] = False,
) -> None:
    """Run one drill, several, or all, each on a fresh fleet.

    A promise is kept, broken, or unknown where the fleet does not show what it is about. Exit 0: all kept; 1: one was
    broken; 2: wrong use; 3: nothing broken, but something is unknown.
    """
    from kvrelay.cli.messages import drill as words
    from kvrelay.lab.drills.run import run_drill

    chosen = _chosen(names)
    make = _fleet(fleet, router_command, confirm or [], seed, out)
    worst = "pass"
    for each in chosen:
        messages.say(words.begun(each.name, each.title))
        played = each if fleet in (SIMULATED, MOCK) else each.afresh(secrets.randbits(_AFRESH_BITS))
        result = asyncio.run(run_drill(played, make))
        worst = max(worst, result.verdict, key=["pass", "unknown", "fail"].index)
        _show(each, result, out=out, json=json, in_full=len(chosen) == 1)
    if out is not None:
        messages.say(words.pages_written(str(out)))
    raise SystemExit(EXIT_OF_VERDICT[worst])


def _chosen(names: list[str]) -> list[Drill]:
    from kvrelay.lab.drills.catalog import ALL as drills

    if names == [ALL]:
        return list(drills.values())
    for name in names:
        if name not in drills:
            messages.fail(messages.unknown_name("drill", name, [*drills, ALL], source="the command line"))
    return [drills[name] for name in names]


def _fleet(
    fleet: str, router_command: str | None, confirm: list[str], seed: int, out: Path | None
) -> Callable[[Drill], Fleet]:
    if fleet == SIMULATED:
        from kvrelay.lab.drills.fleets.simulated import SimulatedFleet

        return lambda drill: SimulatedFleet(drill, seed=seed)
    if fleet == MOCK:
        from kvrelay.lab.drills.fleets.mock import MockProcessFleet
        from kvrelay.lab.drills.fleets.other_router import OtherRouter

        folder = None if out is None else out / "fleets"
        return lambda drill: MockProcessFleet(
            drill,
            front=None if router_command is None else OtherRouter(router_command),
            folder=None if folder is None else folder / drill.name,
        )
    return _attached(fleet, confirm, out)


def _attached(fleet: str, confirm: list[str], out: Path | None) -> Callable[[Drill], Fleet]:
    from kvrelay.cli.messages import drill as words
    from kvrelay.lab.drills.fleets.attached import AttachedFleet, attached_processes
    from kvrelay.lab.drills.fleets.staging_file import Unconfirmed, UnusableFleet, read_fleet

    try:
        target = read_fleet(Path(fleet), confirm)
    except Unconfirmed as refusal:
        messages.fail(words.unconfirmed(f"`{fleet}`", refusal.targets))
    except UnusableFleet as problem:
        messages.fail(words.unusable_fleet(f"`{fleet}` (from `--fleet`)", str(problem)))
    attached = attached_processes(target)
    return lambda drill: AttachedFleet(
        drill, target, attached, folder=None if out is None else out / "fleets" / drill.name
    )


def _show(drill: Drill, result: DrillResult, *, out: Path | None, json: bool, in_full: bool) -> None:
    from kvrelay.cli.messages import drill as words
    from kvrelay.lab.drills.runbook import write_pages

    if out is not None:
        try:
            write_pages(drill, result, out)
        except OSError as problem:
            messages.fail(messages.unusable_input(f"folder `{out}`", problem))
    if json:
        line = {
            "drill": result.drill,
            "fleet": result.fleet,
            "verdict": result.verdict,
            "cannot": result.cannot,
            "promises": msgspec.to_builtins(result.promises),
        }
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    else:
        sys.stdout.write(words.result_lines(result, in_full=in_full) + "\n")
    sys.stdout.flush()


@app.command(
    epilog="Example: kvrelay drill fuzz --seeds 1000 --jobs 2", short_help="Attack simulated fleets at random."
)
def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="How many schedules.")] = 200,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them; each seed is one schedule.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes.")] = 1,
    failures: Annotated[int, typer.Option(min=1, help="End after so many.")] = 1,
    replay: Annotated[Path | None, typer.Option(metavar="FILE", help="Play a kept schedule instead.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where failing schedules are kept.")] = Path("kvrelay-fuzz"),
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Whole fleets under virtual time: gateway, workers, stores, events, clients, and faults at random.

    Invariants are looked at after every step. Whatever fails is shrunk to a small schedule, kept, and can be replayed.
    Exit 0: everything held; 1: something did not.
    """
    from kvrelay.cli.messages import drill as words
    from kvrelay.lab.drills.fuzz.campaign import fuzz as campaign
    from kvrelay.lab.drills.fuzz.campaign import keep

    if replay is not None:
        _replay(replay, json=json)
    _need_stores()
    messages.say(words.fuzzing(first_seed, seeds, jobs))
    began_s, done, found = time.monotonic(), 0, []
    for progress in campaign(first_seed, seeds, jobs=jobs, stop_at=failures):
        done = progress.done
        for each in progress.found:
            found.append(each)
            kept_in = out / f"seed-{each.seed}.json"
            try:
                out.mkdir(parents=True, exist_ok=True)
                keep(each, kept_in)
            except OSError as problem:
                messages.fail(messages.unusable_input(f"folder `{out}`", problem))
            messages.say(words.failure_found(each, str(kept_in)))
    seconds = time.monotonic() - began_s
    if json:
        line = {"first_seed": first_seed, "played": done, "seconds": round(seconds, 1), "cpu_s": round(_cpu_s(), 1)}
        sys.stdout.write(msgspec.json.encode({**line, "found": found}).decode() + "\n")
    elif not found:
        sys.stdout.write(words.nothing_found(done, seconds) + "\n")
    raise SystemExit(1 if found else 0)


def _need_stores() -> None:
    """Many of the fleets share one, and some of those are encrypted."""
    from kvrelay.edge.stores.extras import MissingExtra, need

    try:
        need("cryptography", extra="store", purpose="a fuzzed fleet whose store is encrypted")
    except MissingExtra as missing:
        messages.fail(f"error: {missing}")


def _cpu_s() -> float:
    """Of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _replay(file: Path, *, json: bool) -> None:
    from kvrelay.lab.drills.fuzz.campaign import read_kept
    from kvrelay.lab.drills.fuzz.play import play

    try:
        schedule = read_kept(file)
    except (OSError, msgspec.DecodeError) as problem:
        messages.fail(messages.unusable_input(f"schedule `{file}`", problem))
    if schedule.fleet.store is not None:
        _need_stores()
    failure = play(schedule)
    if json:
        sys.stdout.write(msgspec.json.encode({"seed": schedule.seed, "failure": failure}).decode() + "\n")
    else:
        said = "every invariant held" if failure is None else f"{failure.what}\n  {failure.where}".rstrip()
        sys.stdout.write(f"seed {schedule.seed}, {len(schedule.ops)} operations: {said}\n")
    raise SystemExit(0 if failure is None else 1)
