"""`kvrelay doctor`: look at a fleet from outside and say what is wrong with it, why, and what to do."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvrelay.cli import messages
from kvrelay.cli.gateway_flags import effective_config
from kvrelay.cli.reporting import print_json
from kvrelay.core.doctor.facts import Facts
from kvrelay.core.doctor.finding import Finding, Verdict, examine, overall
from kvrelay.core.doctor.rules import RULES
from kvrelay.edge.doctor.collect import Wanted, collect
from kvrelay.edge.observe.explain import printable

app = typer.Typer(add_completion=False, rich_markup_mode=None)

EPILOG = "Example: kvrelay doctor -c kvrelay.toml --router http://127.0.0.1:8001"
STYLES = {
    Verdict.OK: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.UNKNOWN: "magenta",
    Verdict.NOT_APPLICABLE: "dim",
}


@app.command(epilog=EPILOG)
def doctor(
    file: Annotated[
        Path | None, typer.Option("-c", "--config", metavar="FILE", help="Configuration file (default: kvrelay.toml).")
    ] = None,
    worker: Annotated[list[str] | None, typer.Option(metavar="URL", help="A worker; may be repeated.")] = None,
    router: Annotated[
        str | None, typer.Option(metavar="URL", help="Admin port of a running gateway: its view is examined as well.")
    ] = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token of the admin port.")
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(help="Send two small requests of made-up token ids to each worker, and watch what comes of them."),
    ] = True,
    watch: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=3600,
            help="With --router: judge the traffic of so long; 0: all since it began.",
        ),
    ] = 0.0,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as failures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print {verdict, counts, findings} as JSON.")] = False,
) -> None:
    """Say of each worker and setting whether it is right; if not, why and what to do.

    Exit status: 0 all well (or warnings only), 1 something fails, 2 usage, 3 an essential question has no answer.
    """
    config = effective_config(file, workers=worker, policy=None, host=None, port=None, admin_port=None)
    if not config.workers and router is None:
        messages.fail(messages.nothing_to_examine())
    messages.say(messages.examining(len(config.workers), router, probes=probe))
    wanted = Wanted(
        config=config, router_url=router, admin_token_file=admin_token_file, sends_probes=probe, watch_s=watch
    )
    facts = asyncio.run(collect(wanted))
    findings = examine(facts, RULES)
    verdict = overall(findings)
    if strict and verdict is Verdict.WARN:
        verdict = Verdict.FAIL
    if as_json:
        _print_json(verdict, findings)
    else:
        _print_report(verdict, facts, findings)
    raise SystemExit(_exit_status(verdict))


def _exit_status(verdict: Verdict) -> int:
    match verdict:
        case Verdict.FAIL:
            return messages.VERDICT_FAIL
        case Verdict.UNKNOWN:
            return messages.UNKNOWN
        case _:
            return messages.OK


def _counts(findings: tuple[Finding, ...]) -> dict[str, int]:
    counted = Counter(finding.verdict for finding in findings)
    return {verdict.value: counted[verdict] for verdict in Verdict}


def _print_json(verdict: Verdict, findings: tuple[Finding, ...]) -> None:
    report = {"verdict": verdict, "counts": _counts(findings), "findings": findings}
    print_json(report)


def _print_report(verdict: Verdict, facts: Facts, findings: tuple[Finding, ...]) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    for worker in facts.workers:
        about = f"worker {worker.name}  {worker.url}"
        _print_group(console, about, [finding for finding in findings if finding.worker == worker.name])
    _print_group(console, "fleet", [finding for finding in findings if finding.worker is None])
    console.print(Text(messages.doctor_verdict(verdict.value, _counts(findings)), style=STYLES[verdict]))


def _print_group(console: Console, about: str, findings: list[Finding]) -> None:
    console.print(Text(printable(about), style="bold"))
    for finding in findings:
        verdict = finding.verdict
        line = Text("  ")
        line.append(messages.VERDICT_WORDS[verdict.value].ljust(8), style=STYLES[verdict])
        line.append(f"{finding.code.ljust(18)} {printable(finding.detail)}")
        console.print(line)
        for more in messages.finding_explained(finding.setting, finding.cause, finding.fix):
            console.print(Text(more))
    console.print()
