"""The command `kvrelay`. Sub-commands live in one module each and are imported only when they are called."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer

from kvrelay import __version__
from kvrelay.cli.command_group import CommandGroup

# name -> (module with a Typer `app`, one line for the overview)
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("kvrelay.cli.demo", "The whole story on mock workers: a real agent trace under three policies."),
    "serve": ("kvrelay.cli.serve", "Run the gateway in front of your workers."),
    "mock": ("kvrelay.cli.mock", "Run mock workers, each its own OS process."),
    "agent": ("kvrelay.cli.agent", "Keep a snapshot of a worker's live blocks for routers that come late."),
    "drill": ("kvrelay.cli.drill", "Failure drills with a verdict, and random attacks on simulated fleets."),
    "rollback": ("kvrelay.cli.rollback", "Switch a running gateway back to plain round robin."),
    "chaos": ("kvrelay.cli.chaos", "Put faults on the wire between a worker and the gateway."),
    "doctor": ("kvrelay.cli.doctor", "Examine a fleet: what is wrong with it, why, and what to do."),
    "checklist": ("kvrelay.cli.checklist", "What has to be shown before and after a launch, with evidence."),
    "store": ("kvrelay.cli.store", "Stores of KV objects: serve, list, verify, purge, scrub."),
    "receipts": ("kvrelay.cli.receipts", "Read route receipts: tail, explain, reconcile."),
    "status": ("kvrelay.cli.status", "Time to first token, hit rate, throughput and memory in one line."),
    "top": ("kvrelay.cli.top", "Watch the fleet in the terminal."),
    "dashboard": ("kvrelay.cli.dashboard", "Print the Grafana dashboard, alert rules, table of metrics, runbook."),
    "scrape-map": ("kvrelay.cli.scrape_map", "List how a worker's metrics page is understood."),
    "config": ("kvrelay.cli.config", "Show, explain and check the configuration."),
    "replay": ("kvrelay.cli.replay", "Replay a trace under several policies, arms isolated, and judge by gates."),
    "preflight": ("kvrelay.cli.preflight", "Examine a fleet before a replay: whole snapshot, offline, hash seeds."),
    "gates": ("kvrelay.cli.gates", "Check and lock the gates that a replay is judged by."),
    "report": ("kvrelay.cli.report", "Count, compare and judge a run on disk again."),
    "manifest": ("kvrelay.cli.manifest", "Check what a run states of itself; put two runs together."),
    "plan": ("kvrelay.cli.plan", "What may be added next, and the experiment for it."),
    "verdict": ("kvrelay.cli.verdict", "Keep or drop a tier, from paired requests."),
    "arms": ("kvrelay.cli.arms", "Show in what arms differ; check a plan of contenders."),
    "prompt": ("kvrelay.cli.prompt", "Where two prompts part, and why: the first token that differs."),
    "trace": ("kvrelay.cli.trace", "Look into traces, convert them, cut them down, make prompts of them."),
    "simulate": ("kvrelay.cli.simulate", "What caches would hit and where requests would go, under virtual time."),
    "size": ("kvrelay.cli.size", "How much cache is enough, and when fetching beats computing."),
    "tune": ("kvrelay.cli.tune", "Sweep policy weights against an SLO stated beforehand."),
}


class LazyGroup(CommandGroup):
    """A command group that knows its commands by name and loads one when it is used (start-up stays quick)."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module_name, summary = COMMANDS[cmd_name]
        command = typer.main.get_command(importlib.import_module(module_name).app)
        command.name = cmd_name
        command.short_help = summary
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Plain help from the table above: no sub-command is imported to print the overview."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # they would draw boxes into logs and, in some versions, show local variables
    help="Prefix-cache-aware routing, tiered KV sharing and evidence for fleets of LLM inference workers.",
    epilog="First steps: kvrelay demo; then kvrelay serve --worker http://127.0.0.1:8100",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"kvrelay {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of the whole command."""


def main() -> None:
    app(prog_name="kvrelay")


if __name__ == "__main__":
    main()
