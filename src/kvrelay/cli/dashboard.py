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
    seconds: float = typer.Option(30.0, min=1, max=3600, help="How long the baseline is looked at."),
    token_file: Path | None = typer.Option(None, "--admin-token-file", help="File with the gateway's admin token."),
) -> None:
    """Print a runbook: target, baseline, rollback, and for every alert and drill what to do and when it is over."""
    try:
        baseline = None if router is None else _look(AdminClient(router, token_file), seconds)
    except (AdminUnavailable, OSError, ValueError) as error:
        messages.fail(messages.unusable_input("the gateway", error))
    sys.stdout.write(runbook_text(baseline=baseline))


def _look(client: AdminClient, seconds: float) -> FourNumbers:
    messages.say(wording.looking(client.url, seconds))
    before = read_page(client.metrics(), time.monotonic())
    time.sleep(seconds)
    return four_numbers(Span(before, read_page(client.metrics(), time.monotonic())))
