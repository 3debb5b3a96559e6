"""`kvrelay status`: waiting, hits, throughput and memory of a running gateway in one line, as they belong together."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.admin_client import AdminClient, AdminUnavailable
from kvrelay.cli.messages import status as wording
from kvrelay.edge.observe.readings import Readings, Span, read_page
from kvrelay.edge.observe.windows import four_numbers

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: kvrelay status --router http://127.0.0.1:8001 --seconds 10")
def status(
    router: str = typer.Option("http://127.0.0.1:8001", metavar="URL", help="Admin port of a running gateway."),
    seconds: float = typer.Option(5.0, min=0.1, max=3600, help="How long is looked."),
    token_file: Path | None = typer.Option(None, "--admin-token-file", help="File with the gateway's admin token."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout; what is not known is null."),
) -> None:
    """Print time to first token, hit rate, throughput and KV memory of the next seconds in one line.

    Exit status: 0, or 1 if a worker is down.
    """
    client = AdminClient(router, token_file)
    try:
        before = _read(client)
        time.sleep(seconds)
        span = Span(before, _read(client))
    except (AdminUnavailable, OSError, ValueError) as error:
        messages.fail(messages.unusable_input("the gateway", error))
    numbers = four_numbers(span)
    up = span.after.by("kvrelay_worker_up", "worker")
    down = tuple(name for name, is_up in up.items() if not is_up)
    if as_json:
        report = {**msgspec.structs.asdict(numbers), "workers": len(up), "workers_down": down}
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        sys.stdout.write(wording.one_line(numbers, workers=len(up), down=down) + "\n")
    raise SystemExit(messages.VERDICT_FAIL if down else messages.OK)


def _read(client: AdminClient) -> Readings:
    return read_page(client.metrics(), time.monotonic())
