"""`kvrelay dashboard`: what Grafana, Prometheus and the people on call need, made of one table."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import typer

from kvrelay.cli import messages
from kvrelay.cli.admin_client import AdminClient, AdminUnavailable
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.messages import dashboard as wording
from kvrelay.core.gates.gate_file import GateError, limits_of, parse_gates
from kvrelay.edge.observe.alerts import RUNBOOKS
from kvrelay.edge.observe.files import grafana_json, metrics_markdown, rules_yaml
from kvrelay.edge.observe.readings import Span, read_page
from kvrelay.edge.observe.runbook import runbook as runbook_text
from kvrelay.edge.observe.windows import FourNumbers, four_numbers

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Print the Grafana dashboard, the alert rules, the table of metrics, the runbook.",
)


@app.command(short_help="Print the Grafana dashboard.", epilog="Example: kvrelay dashboard grafana > kvrelay.json")
def grafana() -> None:
    """Print the dashboard; import the file in Grafana and choose your Prometheus there."""
    sys.stdout.write(grafana_json())


@app.command(short_help="Print the alert rules.", epilog="Example: kvrelay dashboard alerts > kvrelay.rules.yml")
def alerts(
    runbooks: str = typer.Option(RUNBOOKS, metavar="URL", help="Where the runbook is; alerts link to URL#CODE."),
) -> None:
    """Print the alert rules for Prometheus."""
    sys.stdout.write(rules_yaml(runbooks))


@app.command(short_help="Print the table of metrics.", epilog="Example: kvrelay dashboard metrics")
def metrics() -> None:
    """Print every metric with its unit, meaning and source, and what the engines call it."""
    sys.stdout.write(metrics_markdown())


@app.command(
    short_help="Print the runbook.",
    epilog="Example: kvrelay dashboard runbook --router http://127.0.0.1:8001 > book.md",
)
def runbook(
    router: str | None = typer.Option(None, metavar="URL", help="Admin port of a running gateway, for the baseline."),
    gates: Path | None = typer.Option(None, metavar="FILE", help="Gates that the fleet has to keep, for the target."),
    seconds: float = typer.Option(30.0, min=1, max=3600, help="How long the baseline is looked at."),
    token_file: Path | None = typer.Option(None, "--admin-token-file", help="File with the gateway's admin token."),
) -> None:
    """Print a runbook: target, baseline, rollback, and for every alert and drill what to do and when it is over."""
    try:
        baseline = None if router is None else _look(AdminClient(router, token_file), seconds)
    except (AdminUnavailable, OSError, ValueError) as error:
        messages.fail(messages.unusable_input("the gateway", error))
    targets = () if gates is None else _targets(gates)
    sys.stdout.write(runbook_text(baseline=baseline, drills=drills_of_this_version(), targets=targets))


def drills_of_this_version() -> tuple[tuple[str, str], ...]:
    """Name of each, and what it must show."""
    from kvrelay.lab.drills.catalog import ALL

    return tuple((drill.name, "; ".join(promise.says for promise in drill.promises)) for drill in ALL.values())


def _targets(file: Path) -> tuple[str, ...]:
    try:
        gates = parse_gates(file.read_bytes()).gates
    except (GateError, OSError) as error:
        messages.fail(messages.unusable_input("the gates", error))
    return tuple(f"{gate.name}: {', and '.join(map(wording.limit, limits_of(gate.condition)))}" for gate in gates)


def _look(client: AdminClient, seconds: float) -> FourNumbers:
    messages.say(wording.looking(client.url, seconds))
    before = read_page(client.metrics(), time.monotonic())
    time.sleep(seconds)
    return four_numbers(Span(before, read_page(client.metrics(), time.monotonic())))
