"""`kvrelay rollback`: back to the plainest routing with one command, whatever went wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.admin_client import AdminClient, AdminUnavailable
from kvrelay.cli.messages import rollback as words

app = typer.Typer(add_completion=False, rich_markup_mode=None)

PLAIN = "round_robin"


@app.command(epilog="Example: kvrelay rollback --router http://127.0.0.1:8001")
def rollback(
    router: str = typer.Option("http://127.0.0.1:8001", help="The gateway's admin port."),
    admin_token_file: Path | None = typer.Option(None, help="File with the token of the admin port."),
    json: bool = typer.Option(False, "--json", help="Print what is in force now as JSON on stdout."),
) -> None:
    """Switch a running gateway to round robin: no prefix matching, no stickiness, no claims of any tier.

    Requests that are under way are not touched. The way forward again is `policy` in the configuration and SIGHUP, or
    PUT /admin/policy.
    """
    client = AdminClient(router, admin_token_file)
    try:
        before = msgspec.json.decode(client.call("GET", "/admin/policy"))["policy"]
        now = msgspec.json.decode(client.call("PUT", "/admin/policy", {"policy": PLAIN}))["policy"]
    except AdminUnavailable as problem:
        messages.fail(words.not_rolled_back(str(problem)))
    except OSError as problem:
        messages.fail(messages.unusable_input(f"token file `{admin_token_file}`", problem))
    if json:
        sys.stdout.write(msgspec.json.encode({"before": before, "policy": now}).decode() + "\n")
    else:
        sys.stdout.write(words.rolled_back(before, now, client.url) + "\n")
