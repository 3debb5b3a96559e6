"""`kvrelay verdict`: may a tier stay? Keep, drop or unknown, from paired requests."""

from __future__ import annotations

import sys
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli import messages
from kvrelay.cli.messages import plan as words
from kvrelay.cli.reporting import print_json

if TYPE_CHECKING:
    from kvrelay.lab.arms.ruling import Run
    from kvrelay.lab.arms.tier_verdict import Side

app = typer.Typer(add_completion=False, rich_markup_mode=None)

EXIT = {"keep": messages.OK, "drop": messages.VERDICT_FAIL, "unknown": messages.UNKNOWN}


@app.command(
    epilog="Example: kvrelay verdict plan/paired --tier remote; kvrelay verdict with --baseline-run without",
)
def verdict(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run with the tier, or with both arms.")],
    tier: Annotated[str, typer.Option(help="Of a run with several: cpu or remote.")] = "remote",
    candidate: Annotated[str | None, typer.Option(metavar="ARM", help="The arm with the tier.")] = None,
    baseline: Annotated[str | None, typer.Option(metavar="ARM", help="The arm without it.")] = None,
    baseline_run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run of the same plan on workers without the tier.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print {decision, tier, verdict} as JSON.")] = False,
) -> None:
    """Keep a tier only if full TTFT, tasks and reliability are better than computing without it.

    Every request with the tier is compared with the same one without. Exit 0: keep; 1: drop; 2: no such runs, or they
    differ in more; 3: not shown either way, so leave it off.
    """
    from kvrelay.lab.arms.tier_verdict import NotComparable, tier_verdict

    if tier not in ("cpu", "remote"):
        messages.fail(messages.unknown_name("tier", tier, ("cpu", "remote"), source="`--tier`"))
    with_tier = _read(folder)
    if baseline_run is None:
        without, against = _pair(with_tier, folder, tier, candidate, baseline)
    else:
        against = _side(with_tier, folder, candidate)
        without = _side(_read(baseline_run), baseline_run, baseline)
    try:
        found = tier_verdict(without, against)
    except NotComparable as problem:
        messages.fail(words.not_comparable(problem.reasons))
    except OSError as problem:
        messages.fail(messages.unusable_input(f"the arms' configurations in `{folder}`", problem))
    label = found.verdict.label
    if as_json:
        report = {"decision": found.decision, "tier": found.tier, "label": label, "verdict": found.verdict}
        print_json(report)
    else:
        sys.stdout.write(words.tier_story(found, words.LABELS[label]))
    raise typer.Exit(EXIT[found.decision.value])


def _read(folder: Path) -> Run:
    from kvrelay.cli.messages import replay as replay_words
    from kvrelay.lab.arms.run import read_back
    from kvrelay.lab.arms.run_folder import NoRun

    try:
        return read_back(folder)
    except NoRun as problem:
        messages.fail(replay_words.no_run(str(problem)))


def _pair(run: Run, folder: Path, tier: str, candidate: str | None, baseline: str | None) -> tuple[Side, Side]:
    """The two arms that are named; else the two that differ in this tier."""
    from kvrelay.lab.arms.tier_verdict import Side, added_by

    names = list(run.measured.results)
    for name, flag in ((candidate, "--candidate"), (baseline, "--baseline")):
        if name is not None and name not in names:
            messages.fail(messages.unknown_name("arm", name, names, source=f"`{flag}`"))
    try:
        tiers = {name: set(added_by(folder, run, name)) for name in names}
    except (OSError, ValueError) as problem:
        messages.fail(messages.unusable_input(f"the arms' configurations in `{folder}`", problem))
    is_named = candidate is not None and baseline is not None
    fitting = [
        (left, right)
        for left, right in permutations(names, 2)
        if (candidate or right, baseline or left) == (right, left)
        and (is_named or (tiers[right] - tiers[left] == {tier} and tiers[left] <= tiers[right]))
    ]
    if not fitting:
        messages.fail(words.no_pair(folder, names))
    return Side(run, folder, fitting[0][0]), Side(run, folder, fitting[0][1])


def _side(run: Run, folder: Path, name: str | None) -> Side:
    """The arm of that name, or the only one."""
    from kvrelay.lab.arms.tier_verdict import Side

    names = list(run.measured.results)
    if name is None and len(names) == 1:
        return Side(run, folder, names[0])
    if name is None or name not in names:
        messages.fail(messages.unknown_name("arm", name or "", names, source=f"`{folder}`"))
    return Side(run, folder, name)
