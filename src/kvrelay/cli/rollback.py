"""`kvrelay rollback`: back to the plainest routing and to what every worker computes itself, whatever went wrong."""

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
UNKNOWN = 3


class _Answer(msgspec.Struct):
    workers: tuple[words.Shared, ...]


@app.command(epilog="Example: kvrelay rollback --router http://127.0.0.1:8001")
def rollback(
    router: str = typer.Option("http://127.0.0.1:8001", help="The gateway's admin port."),
    admin_token_file: Path | None = typer.Option(None, help="File with the token of the admin port."),
    policy_only: bool = typer.Option(False, "--policy-only", help="Leave shared tiers as they are."),
    json: bool = typer.Option(False, "--json", help="Print what is in force now as JSON on stdout."),
) -> None:
    """Switch a running gateway to round robin, and its workers to their own caches: no prefix matching, no stickiness,
    no KV loaded from a shared tier or saved there.

    Requests that are under way are not touched. Exit 0: all of it is in force; 3: of some worker it is not known.
    Workers that start anew are told, too; a gateway that does has forgotten it. The way forward is PUT /admin/policy
    and PUT /admin/sharing.
    """
    client = AdminClient(router, admin_token_file)
    try:
        before = msgspec.json.decode(client.call("GET", "/admin/policy"))["policy"]
        now = msgspec.json.decode(client.call("PUT", "/admin/policy", {"policy": PLAIN}))["policy"]
    except AdminUnavailable as problem:
        messages.fail(words.not_rolled_back(str(problem)))
    except OSError as problem:
        messages.fail(messages.unusable_input(f"token file `{admin_token_file}`", problem))
    shared = () if policy_only else _leave_tiers_alone(client)
    if json:
        told = {"before": before, "policy": now, "sharing": shared}
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    else:
        sys.stdout.write(words.rolled_back(before, now, client.url, shared) + "\n")
        messages.say(words.back_again(before, client.url, shared=any(each.sharing == "off" for each in shared)))
    unproven = [each.worker for each in shared if each.sharing not in ("off", "none")]
    if unproven:
        messages.say(words.not_proven(unproven))
        raise typer.Exit(UNKNOWN)


def _leave_tiers_alone(client: AdminClient) -> tuple[words.Shared, ...]:
    try:
        return msgspec.json.decode(client.call("PUT", "/admin/sharing", {"on": False}), type=_Answer).workers
    except (AdminUnavailable, msgspec.DecodeError) as problem:
        messages.say(words.tiers_untouched(str(problem)))
        raise typer.Exit(UNKNOWN) from problem
