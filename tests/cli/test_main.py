"""What `kvrelay` answers to calls that it cannot take: whole messages, exit status 2, nothing on stdout."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import COMMANDS, app


def talk_after(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, prog_name="kvrelay")
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "srve",
            "error: unknown command `srve` (from `kvrelay`)\n"
            f"  known commands: {', '.join(f'`{name}`' for name in sorted(COMMANDS))}\n"
            "hint: did you mean `serve`?\n",
        ),
        (
            "receipts tial",
            "error: unknown command `tial` (from `kvrelay receipts`)\n"
            "  known commands: `explain`, `reconcile`, `schema`, `tail`\n"
            "hint: did you mean `tail`?\n",
        ),
        (
            "serve --polcy sticky",
            "error: unknown option `--polcy` (from `kvrelay serve`)\n"
            "  known options: `--admin-port`, `--config`, `--help`, `--host`, `--json`, `--policy`, `--port`,"
            " `--worker`\n"
            "hint: did you mean `--policy`?\n",
        ),
        ("serve --port abc", "error: `--port` is `abc` (from the command line)\n  legal: a whole number\n"),
        ("demo --workers 0", "error: `--workers` is `0` (from the command line)\n  legal: at least 1\n"),
        ("demo --repeats 21", "error: `--repeats` is `21` (from the command line)\n  legal: at most 20\n"),
        ("mock --decode-ms x", "error: `--decode-ms` is `x` (from the command line)\n  legal: a number\n"),
        (
            "receipts explain",
            "error: `kvrelay receipts explain` needs REQUEST_ID|FILE:LINE, which was not given\n"
            "hint: kvrelay receipts explain --help\n",
        ),
        (
            "serve http://a:1",
            "error: got unexpected extra argument(s) (http://a:1) (from `kvrelay serve`)\nhint: kvrelay serve --help\n",
        ),
    ],
)
def test_a_call_that_cannot_be_taken_says_why(call: str, message: str) -> None:
    assert talk_after(*call.split()) == message


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_or_names_its_own_commands(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], prog_name="kvrelay")
    assert result.exit_code == 0
    assert "Example: " in result.stdout or "Commands:" in result.stdout
    assert "--install-completion" not in result.stdout
    assert "..." not in result.stdout.partition("Commands:")[2], "a summary was cut off"


def test_without_a_command_the_help_is_shown_and_the_status_says_that_nothing_was_done() -> None:
    assert talk_after().startswith("Usage: kvrelay ")
