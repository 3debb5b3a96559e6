"""`kvrelay plan`: what may be tried next, and the experiment for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.messages import plan as words
from kvrelay.cli.reporting import print_json

if TYPE_CHECKING:
    from kvrelay.core.checklist.ladder import Step
    from kvrelay.edge.connectors.sglang.hicache import HiCache

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Order of adoption (router, CPU tier, remote tier, split), and experiments for the next step.",
    epilog="Example: kvrelay plan show --evidence runs; kvrelay plan make tiers --evidence runs --out plan",
)

Evidence = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="Where runs lie; repeat it. Default: the working directory.")
]
Rehearsal = Annotated[bool, typer.Option("--rehearsal", help="Runs on mock workers and on one worker count as well.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
REMOTES = {"mock": "file://OUT/remote", "vllm": "valkey://127.0.0.1:6379/0", "sglang": "mooncake"}


@app.command(epilog="Example: kvrelay plan show --evidence runs", short_help="Which steps have been shown.")
def show(evidence: Evidence = None, rehearsal: Rehearsal = False, as_json: AsJson = False) -> None:
    """Show every step with what has been shown of it, and what is closed until then."""
    steps = _ladder(evidence, rehearsal=rehearsal)
    if as_json:
        print_json(steps)
    else:
        sys.stdout.write(words.ladder(steps))


@app.command(epilog="Example: kvrelay plan check remote --evidence runs", short_help="May this step be tried?")
def check(
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="router, cpu, remote or split.")],
    evidence: Evidence = None,
    rehearsal: Rehearsal = False,
) -> None:
    """Say whether a step may be tried. Exit 0: it may; 1: the one before it has not been shown to be worth it."""
    steps = _ladder(evidence, rehearsal=rehearsal)
    _demand(stage, steps, shown=stage)
    step = next(one for one in steps if one.stage.value == stage)
    sys.stdout.write(words.may_be_tried(stage, step.why))


@app.command(
    epilog="Example: kvrelay plan make tiers --policy cache_load --remote valkey://127.0.0.1:6379/0 --out plan",
    short_help="Write the arms of an experiment with tiers.",
)
def make(
    step: Annotated[str, typer.Argument(metavar="STEP", help="cpu, remote, or tiers for both in one matrix.")],
    policy: Annotated[str, typer.Option(help="Of the router, the same in all arms.")] = "cache_load",
    engine: Annotated[str, typer.Option(help="mock, vllm or sglang.")] = "mock",
    cpu_gb: Annotated[float, typer.Option(min=0.001, help="Of host memory for the CPU tier.")] = 1.0,
    remote: Annotated[
        str | None, typer.Option(metavar="URL", help="The remote tier; for sglang the name of a storage backend.")
    ] = None,
    hicache_ratio: Annotated[float, typer.Option(help="sglang: host pool to device pool.")] = 2.0,
    page_size: Annotated[int, typer.Option(min=1, help="sglang: tokens per page, in all arms.")] = 64,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the plan is written.")] = Path("kvrelay-plan"),
    evidence: Evidence = None,
    rehearsal: Rehearsal = False,
    as_json: AsJson = False,
) -> None:
    """Write the arms GPU, GPU+CPU, GPU+CPU+remote, each in a cold, a warm and a restart block, the policy fixed.

    Refused with exit 1 until the step before has been shown to be worth it.
    """
    from kvrelay.edge.connectors.sglang.hicache import HiCache
    from kvrelay.lab.plan.tiers import ENGINES, STEPS, Wanted, tier_plan, write_plan

    if step not in STEPS:
        messages.fail(messages.unknown_name("step", step, STEPS, source="the command line"))
    if engine not in ENGINES:
        messages.fail(messages.unknown_name("engine", engine, ENGINES, source="`--engine`"))
    _check_policy(policy)
    cache = HiCache(page_size=page_size, ratio=hicache_ratio)
    target = remote or REMOTES[engine].replace("OUT", str(out.resolve()))
    if engine == "sglang":
        _check_hicache(msgspec.structs.replace(cache, storage=target))
    else:
        _check_store(target)
    _demand(step, _ladder(evidence, rehearsal=rehearsal), shown="cpu" if step == "tiers" else step)
    wanted = Wanted(step=step, policy=policy, engine=engine, cpu_bytes=int(cpu_gb * 1e9), remote=target, hicache=cache)
    made = tier_plan(wanted, out=out)
    try:
        files = write_plan(made, out)
    except OSError as problem:
        messages.fail(messages.unwritable_folder(out, problem.strerror or str(problem)))
    if as_json:
        print_json(made)
    else:
        sys.stdout.write(words.planned(made, files))


@app.command(
    epilog="Example: kvrelay plan hicache --device-pool-tokens 400000 --kv-bytes-per-token 131072 --ranks 2",
    short_help="SGLang's HiCache flags, and whether the host has the memory.",
)
def hicache(
    device_pool_tokens: Annotated[
        int, typer.Option(min=1, help="Of one rank: `max_total_num_tokens` in the server's log.")
    ],
    kv_bytes_per_token: Annotated[float, typer.Option(min=1, help="Of one rank, over all its layers and heads.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on this host.")] = 1,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 64,
    ratio: Annotated[float, typer.Option(help="Host pool to device pool.")] = 2.0,
    io_backend: Annotated[str, typer.Option(help="kernel or direct.")] = "kernel",
    write_policy: Annotated[str, typer.Option(help="write_through, write_through_selective, write_back.")] = (
        "write_through"
    ),
    storage: Annotated[str | None, typer.Option(help="A storage backend below the host tier.")] = None,
    free_memory: Annotated[float | None, typer.Option(metavar="GIB", min=0, help="Default: this machine's.")] = None,
    reserve: Annotated[float, typer.Option(metavar="GIB", min=0, help="To stay free; SGLang keeps 10.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Print the flags for SGLang, after a look at the host's memory. Exit 0: fits; 1: does not; 2: not legal."""
    from kvrelay.edge.connectors.sglang.hicache import HiCache, flags, host_ram
    from kvrelay.edge.doctor.machine import free_bytes

    cache = HiCache(page_size=page_size, ratio=ratio, io_backend=io_backend, write_policy=write_policy, storage=storage)
    _check_hicache(cache)
    free = free_bytes() if free_memory is None else int(free_memory * 2**30)
    if free is None:
        messages.fail(words.no_memory_figures())
    ram = host_ram(
        cache,
        device_pool_tokens=device_pool_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
        ranks=ranks,
        free_bytes=free,
        reserve_bytes=int(reserve * 2**30),
    )
    if as_json:
        report = {"flags": flags(cache), "fits": ram.fits, **msgspec.structs.asdict(ram)}
        print_json(report)
    else:
        messages.say(words.host_ram(ram, ranks=ranks))
        sys.stdout.write(" ".join(flags(cache)) + "\n" if ram.fits else "")
    if not ram.fits:
        messages.fail(words.no_room(ram, ratio), code=messages.VERDICT_FAIL)


def _ladder(evidence: list[Path] | None, *, rehearsal: bool) -> tuple[Step, ...]:
    from kvrelay.cli.messages.checklist import no_place, unread
    from kvrelay.core.checklist.dossier import Deployment, Dossier
    from kvrelay.core.checklist.ladder import ladder
    from kvrelay.lab.checklist.reports import find

    places = evidence or [Path()]
    for place in places:
        if not place.exists():
            messages.fail(no_place(place))
    found = find(places)
    if found.unread:
        messages.say(unread(found.unread))
    return ladder(Dossier(runs=found.runs, deployment=Deployment(policy="")), rehearsal=rehearsal)


def _demand(asked: str, steps: tuple[Step, ...], *, shown: str) -> None:
    """Ends the process unless the step called `shown` may be tried."""
    known = [step.stage.value for step in steps]
    if shown not in known:
        messages.fail(messages.unknown_name("stage", asked, known, source="the command line"))
    step = steps[known.index(shown)]
    if not step.open:
        messages.fail(words.too_early(asked, step.why), code=messages.VERDICT_FAIL)


def _check_policy(policy: str) -> None:
    from kvrelay.cli.demo import policy_names

    policy_names(policy, source="`--policy`")


def _check_store(url: str) -> None:
    from kvrelay.edge.system.config import ConfigError, load_config

    try:
        load_config(flags={"store.tiers": [{"url": url}]})
    except ConfigError as problem:
        messages.fail(messages.config_problems(problem.problems))


def _check_hicache(cache: HiCache) -> None:
    problems = cache.problems()
    if problems:
        _refuse(problems)


def _refuse(problems: tuple[tuple[str, object, str], ...]) -> NoReturn:
    messages.fail(
        "\n".join(
            messages.bad_value(name, value, legal, source=f"`--{name.replace('_', '-')}`")
            for name, value, legal in problems
        )
    )
