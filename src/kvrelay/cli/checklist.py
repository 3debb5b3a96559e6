"""`kvrelay checklist`: what has to be shown before and after a launch, item by item, each with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.messages import checklist as words
from kvrelay.cli.reporting import EXIT_OF_VERDICT, print_json

if TYPE_CHECKING:
    from kvrelay.core.checklist.item import Checked
    from kvrelay.core.sizing.breakeven import Prefill
    from kvrelay.edge.connectors.lmcache.verdict import Host

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Checklists for operators: beginner, prelaunch, postlaunch, redflags; each item with its evidence.",
    epilog="Example: kvrelay checklist run --stage prelaunch -c kvrelay.toml --evidence runs",
)

ALL = "all"
STYLES = {"pass": "green", "fail": "bold red", "unknown": "magenta"}


@app.callback()
def checklist() -> None:
    """Exit 0: everything was shown; 1: something fails; 3: something is not shown yet."""


@app.command(
    epilog="Example: kvrelay checklist run --stage beginner --evidence kvrelay-replay --evidence drills",
    short_help="Evaluate a checklist.",
)
def run(
    stage: Annotated[
        str, typer.Option(metavar="STAGE", help="beginner, prelaunch, postlaunch, redflags or all.")
    ] = "beginner",
    evidence: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR|FILE", help="Where runs, blocks and drills lie; repeat it. Default: here."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-c", "--config", metavar="FILE", help="Configuration file (default: kvrelay.toml).")
    ] = None,
    worker: Annotated[list[str] | None, typer.Option(metavar="URL", help="A worker; may be repeated.")] = None,
    router: Annotated[str | None, typer.Option(metavar="URL", help="Admin port of a running gateway.")] = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token of the admin port.")
    ] = None,
    lmcache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An LMCache configuration that is deployed.")
    ] = None,
    host_memory: Annotated[float | None, typer.Option(metavar="GIB", min=0, help="Default: this machine's.")] = None,
    engine_memory: Annotated[
        float, typer.Option(metavar="GIB", min=0, help="Host memory of one engine process without any cache.")
    ] = 8.0,
    buffer: Annotated[
        float | None, typer.Option(metavar="GIB", min=0, help="To be left free. Default: a tenth of the host's memory.")
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="Engine processes on the host.")] = 1,
    kv_bytes_per_token: Annotated[
        float | None, typer.Option(min=1, help="KV bytes of one token, for break-even of shared tiers.")
    ] = None,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="How fast workers compute. Default: as the gateway has learned it.")
    ] = None,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Length of a usual shared prefix.")] = 2048,
    cold_ttft_ms: Annotated[
        float | None, typer.Option(min=0, help="Acceptable p95 of the first wave after a restart.")
    ] = None,
    probe: Annotated[bool, typer.Option(help="Send small requests to workers and small objects to tiers.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print {verdict, stages} as JSON.")] = False,
) -> None:
    """Evaluate a checklist: every item pass, fail or unknown, with the reason and where its evidence lies.

    Exit 0: all pass; 1: one fails (a red flag); 2: usage; 3: none fails, and something has not been shown.
    """
    from kvrelay.cli.gateway_flags import effective_config
    from kvrelay.core.checklist.dossier import Limits
    from kvrelay.core.checklist.item import check, overall
    from kvrelay.core.checklist.stages import STAGES
    from kvrelay.lab.checklist.gather import Asked, gather

    if stage not in (*STAGES, ALL):
        messages.fail(messages.unknown_name("stage", stage, (*STAGES, ALL), source="`--stage`"))
    places = tuple(evidence or [Path()])
    for place in places:
        if not place.exists():
            messages.fail(words.no_place(place))
    config = effective_config(file, workers=worker, policy=None, host=None, port=None, admin_port=None)
    messages.say(words.looking(places, len(config.workers), router, touches=probe))
    dossier, unread = gather(
        Asked(
            places=places,
            config=config,
            config_source=_source(file),
            router_url=router,
            admin_token_file=admin_token_file,
            lmcache=None if lmcache is None else _lmcache(lmcache),
            lmcache_source=str(lmcache),
            host=_host(host_memory, engine_memory, buffer, engines, is_needed=lmcache is not None),
            rates=_rates(prefill_tokens_per_s, router, admin_token_file),
            limits=Limits(
                cold_ttft_ms=cold_ttft_ms, prefix_tokens=prefix_tokens, kv_bytes_per_token=kv_bytes_per_token
            ),
            touches=probe,
        )
    )
    if unread:
        messages.say(words.unread(unread))
    found = {name: check(STAGES[name], dossier) for name in (STAGES if stage == ALL else [stage])}
    everything = [one for own in found.values() for one in own]
    verdict = overall(everything).value
    if as_json:
        print_json({"verdict": verdict, "stages": found})
    else:
        _show(found, verdict, everything)
    raise typer.Exit(EXIT_OF_VERDICT[verdict])


def _show(found: Mapping[str, tuple[Checked, ...]], verdict: str, everything: list[Checked]) -> None:
    from rich.console import Console
    from rich.text import Text

    from kvrelay.edge.observe.explain import printable

    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    width = min(console.width, 110)
    for name, own in found.items():
        for outcome, line in words.lines(name, own, width=width):
            console.print(Text(printable(line), style=STYLES.get(outcome, "")))
    console.print(Text(words.verdict(verdict, everything), style=STYLES[verdict]))


def _source(file: Path | None) -> str:
    """Where the configuration comes from."""
    from kvrelay.edge.system.config import DEFAULT_FILE

    if file is not None:
        return str(file)
    return DEFAULT_FILE if Path(DEFAULT_FILE).is_file() else "built-in defaults"


def _lmcache(file: Path) -> Mapping[str, Any]:
    from kvrelay.cli.messages import lmcache as wording
    from kvrelay.edge.connectors.lmcache.reader import Unreadable, read_file

    try:
        return read_file(file)
    except (Unreadable, OSError) as fault:
        messages.fail(wording.unreadable(str(file), fault))


def _host(
    memory_gib: float | None, engine_gib: float, buffer_gib: float | None, engines: int, *, is_needed: bool
) -> Host | None:
    from kvrelay.cli.messages import lmcache as wording
    from kvrelay.edge.connectors.lmcache.verdict import Host
    from kvrelay.edge.doctor.machine import memory_bytes

    if memory_gib is None:
        found = memory_bytes()
        if found is None and is_needed:
            messages.fail(wording.no_host_memory())
        if found is None:
            return None
        memory_gib = found / 2**30
    return Host(
        memory_gib=memory_gib,
        engine_gib=engine_gib,
        buffer_gib=memory_gib / 10 if buffer_gib is None else buffer_gib,
        workers=engines,
    )


def _rates(stated: float | None, router: str | None, token_file: Path | None) -> tuple[Prefill, ...]:
    """Stated, or learned by the gateway; none where it has learned none yet."""
    from kvrelay.cli.admin_client import AdminClient, AdminUnavailable
    from kvrelay.core.sizing.breakeven import Prefill
    from kvrelay.lab.sizing.live import NotAGateway, learned_rates

    if stated is not None:
        return (Prefill("stated", stated),)
    if router is None:
        return ()
    try:
        return learned_rates(AdminClient(router, token_file).workers())
    except (AdminUnavailable, NotAGateway, OSError) as problem:
        messages.say(f"warning: no prefill rates: {problem}")
        return ()
