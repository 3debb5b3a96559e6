"""`kvrelay replay`: one trace, several policies, isolated arms, and a verdict by gates that were written before."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.demo import complain, load_trace, make_folder, policy_names, run_to_end
from kvrelay.cli.messages import replay as words

app = typer.Typer(add_completion=False, rich_markup_mode=None)

DEFAULT_OUT = Path("kvrelay-replay")
RESETS = "fresh_processes (mock workers), reset_prefix_cache, cache_salt or none"


@app.command(
    epilog="Example: kvrelay replay sessions.jsonl --policy round_robin --policy cache_load --gates gates.toml",
)
def replay(
    trace: Path = typer.Argument(..., help="A trace in any known format, plain or .gz; `preset:NAME`; or `bundled`."),
    policy: list[str] = typer.Option([], help="Repeat it. Default: round_robin, sticky, cache_load."),
    arms: Path | None = typer.Option(None, help="TOML with [[contender]] tables, instead of `--policy`."),
    repeats: int = typer.Option(3, min=1, max=50, help="Arms per policy; below 3 the evidence is `insufficient`."),
    gates: Path | None = typer.Option(None, help="Gates, written and locked beforehand: `kvrelay gates lock FILE`."),
    fleet: Path | None = typer.Option(None, help="TOML with [[workers]] that run already. Default: mock workers."),
    workers: int = typer.Option(4, min=1, max=16, help="Mock workers, where no fleet is named."),
    reset: str = typer.Option("", help=f"Between arms: {RESETS}. Default: the first that the fleet allows."),
    order: str = typer.Option("latin", help="Of the arms: latin (rotated) or abba."),
    seed: int = typer.Option(1, help="Of prompts and resampling; the same seed gives the same bytes."),
    speed: float | None = typer.Option(None, min=0.001, help="Times of the trace are divided by it."),
    block_tokens: int | None = typer.Option(None, min=4, help="Tokens that stand for one block of the trace."),
    max_requests: int | None = typer.Option(None, min=1, help="At most so many, counted after all else was cut."),
    max_sessions: int | None = typer.Option(None, min=1, help="Whole sessions to keep."),
    sample_seed: int | None = typer.Option(None, help="Draw the sessions with this seed. Default: the first ones."),
    max_turns: int | None = typer.Option(None, min=1, help="Turns per session to keep."),
    max_context_tokens: int | None = typer.Option(None, min=1, help="A longer turn, and all after it, is left out."),
    max_gap_ms: float | None = typer.Option(None, min=0, help="Longest pause between turns, after division."),
    max_output_tokens: int | None = typer.Option(None, min=1, help="Longest answer."),
    concurrency: int | None = typer.Option(None, min=1, help="Cap on requests in flight: no open loop any more."),
    out: Path = typer.Option(DEFAULT_OUT, help="Folder for manifest, raw records and report."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object on stdout."),
) -> None:
    """Replay a trace once per policy and repeat, each arm isolated, and judge by gates.

    Exit 0: pass (or, without gates, measured); 1: fail; 2: usage; 3: unknown or insufficient evidence.
    """
    from kvrelay.cli.arm_progress import ArmProgress
    from kvrelay.lab.arms.run import run
    from kvrelay.lab.arms.standing_settings import Wishes

    wishes = Wishes(
        speed=speed, block_tokens=block_tokens, max_requests=max_requests, max_sessions=max_sessions,
        sample_seed=sample_seed, max_turns=max_turns, max_context_tokens=max_context_tokens, max_gap_ms=max_gap_ms,
        max_output_tokens=max_output_tokens,
    )  # fmt: skip
    source = load_trace(None if str(trace) == "bundled" else trace, bundled="with `bundled` as the trace")
    contenders = _contenders(policy, arms)
    if source.preset is not None and source.preset.phases:
        from kvrelay.cli.replay_blocks import replay_blocks

        refused = {"--fleet": fleet, "--gates": gates}
        replay_blocks(source, contenders, wishes, refused, workers=workers, seed=seed, out=out, as_json=json)
        return
    where, settings = _where(source.trace, fleet, workers, wishes)
    settings = msgspec.structs.replace(
        settings,
        contenders=contenders, repeats=repeats, seed=seed, order=_order(order), reset=_reset(reset, where, fleet),
        max_in_flight=concurrency or (source.preset.max_in_flight if source.preset is not None else None),
    )  # fmt: skip
    stated = None if gates is None else _stated(gates, [contender.name for contender in contenders])
    make_folder(out)
    with ArmProgress() as progress:
        done = run_to_end(run(source, settings, where, out=out, watcher=progress, gates=stated))
    _finish(done, out, as_json=json)


def show(done: Any, out: Path, *, as_json: bool) -> None:
    """Writes the report's files, and the result to stdout."""
    from kvrelay.lab.report.files import summary, write_files
    from kvrelay.lab.report.view import overview_table

    write_files(done, out)
    if as_json:
        sys.stdout.write(msgspec.json.encode(summary(done)).decode() + "\n")
        return
    ruling, fleet = done.ruling, done.measured.manifest.stated.fleet
    said = (
        words.ranking(ruling.ranking.won, ruling.ranking.why)
        if ruling.verdict is None
        else words.verdict(ruling.verdict)
    )
    table = overview_table(done.measured.results, winner=ruling.ranking.winner).transposed().text()
    sys.stdout.write(words.replay_story(words.heading(fleet.label, fleet.hardware), table, said, out))


def end_by(done: Any) -> None:
    """Ends the process as the verdict says; without gates as a demo does."""
    from kvrelay.cli.demo import problems

    verdict = done.ruling.verdict
    if verdict is None:
        complain(done.measured)
        return
    behind = [found for found in problems(done.measured) if "left behind" in found]
    if behind:
        messages.fail(messages.demo_complaints(behind), code=messages.VERDICT_FAIL)
    if verdict.exit_status:
        raise typer.Exit(verdict.exit_status)


def _finish(done: Any, out: Path, *, as_json: bool) -> None:
    from kvrelay.lab.arms.results import sent_late
    from kvrelay.lab.report.load_facts import sending_of

    show(done, out, as_json=as_json)
    for policy, found in sending_of(done.measured).items():
        if found.held_requests:
            messages.say(words.not_an_open_loop(policy, found.why_not or ""))
    for policy, result in done.measured.results.items():
        if sent_late(result):
            messages.say(messages.sender_was_late(policy, result.send_lag_ms.p99))
    end_by(done)


def _contenders(policies: list[str], arms: Path | None) -> Any:
    from kvrelay.lab.arms.contender import Contender
    from kvrelay.lab.arms.contender_file import ContenderFileError, read_contenders
    from kvrelay.lab.arms.settings import POLICIES

    if arms is None:
        names = policy_names(",".join(policies), source="`--policy`") if policies else POLICIES
        return tuple(Contender.of_policy(name) for name in names)
    if policies:
        messages.fail(messages.bad_usage("`--policy` and `--arms` both say who takes part", "kvrelay replay"))
    try:
        return read_contenders(arms)
    except OSError as problem:
        messages.fail(words.unreadable("arms", arms, problem.strerror or str(problem)))
    except ContenderFileError as problem:
        messages.fail(words.not_legal("arms", arms, problem.found, problem.legal))


def _where(trace: Any, fleet: Path | None, workers: int, wishes: Any) -> tuple[Any, Any]:
    """The fleet, and the settings that suit it."""
    from kvrelay.lab.arms.fleets import FreshMocks
    from kvrelay.lab.arms.standing_settings import standing_settings, wished
    from kvrelay.lab.demo.settings import settings_for

    if fleet is None:
        settings = wished(settings_for(trace, workers=workers, repeats=1, policies=(), seed=1), wishes)
        return FreshMocks(settings.fleet, ready_timeout_s=settings.ready_timeout_s), settings
    file, standing, described = standing_fleet(fleet)
    if file.has_router:
        messages.say(words.router_not_used(fleet))
    return standing, standing_settings(trace, described.workers, wishes)


def standing_fleet(path: Path) -> tuple[Any, Any, Any]:
    """The file, the fleet, and what its workers say; ends the process with a message when one of them does not do."""
    from kvrelay.lab.arms.fleet_file import FleetFileError, read_fleet
    from kvrelay.lab.arms.fleets import FleetUnusable, StandingFleet

    try:
        file = read_fleet(path)
        fleet = StandingFleet(file)
        return file, fleet, asyncio.run(fleet.describe())
    except OSError as problem:
        messages.fail(words.unreadable("fleet", path, problem.strerror or str(problem)))
    except FleetFileError as problem:
        messages.fail(words.not_legal("fleet", path, problem.found, problem.legal))
    except FleetUnusable as problem:
        messages.fail(words.unreadable("fleet", path, str(problem)), code=messages.UNKNOWN)


def _reset(name: str, where: Any, fleet: Path | None) -> Any:
    from kvrelay.lab.arms.settings import Reset

    possible = [one.value for one in where.resets]
    if not name:
        return where.resets[0]
    if name not in possible:
        messages.fail(words.reset_not_possible(name, possible, "mock workers" if fleet is None else "a fleet"))
    return Reset(name)


def _order(name: str) -> Any:
    from kvrelay.lab.arms.settings import Order

    legal = [one.value for one in Order]
    if name not in legal:
        messages.fail(messages.unknown_name("order", name, legal, source="`--order`"))
    return Order(name)


def _stated(path: Path, contenders: list[str]) -> Any:
    store = load_gates(path)
    for arm in (store.file.candidate, store.file.baseline):
        if arm not in contenders:
            messages.fail(messages.unknown_name("arm", arm, contenders, source=f"`{path}`"))
    if store.lock is None or store.lock.sha256 != store.file.digest:
        messages.say(words.will_not_be_registered(path, changed=store.lock is not None))
    return store


def load_gates(path: Path) -> Any:
    """Ends the process with a message when the file is no gates."""
    from kvrelay.core.gates.gate_file import GateError
    from kvrelay.lab.arms.gate_store import read_gates

    try:
        return read_gates(path)
    except OSError as problem:
        messages.fail(words.unreadable("gates", path, problem.strerror or str(problem)))
    except GateError as problem:
        messages.fail(words.gate_problem(path, problem))
