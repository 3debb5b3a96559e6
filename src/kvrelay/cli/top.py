"""`kvrelay top`: the live page's picture in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.cli import messages
from kvrelay.cli.admin_client import AdminClient, AdminUnavailable
from kvrelay.cli.messages import top as wording
from kvrelay.edge.observe.explain import printable

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Picture = dict[str, Any]
STYLES = {"routable": "green", "draining": "yellow"}
TROUBLE = {"warn": "yellow", "fail": "bold red"}
BAR_CELLS = 10


@app.command(epilog="Example: kvrelay top --router http://127.0.0.1:8001")
def top(
    router: str = typer.Option("http://127.0.0.1:8001", metavar="URL", help="Admin port of a running gateway."),
    once: bool = typer.Option(False, "--once", help="Print one picture, the second one, which has rates, and end."),
    token_file: Path | None = typer.Option(None, "--admin-token-file", help="File with the gateway's admin token."),
    as_json: bool = typer.Option(False, "--json", help="Print pictures as JSON lines instead."),
) -> None:
    """Watch the fleet: the four numbers, workers, what the rules say, the last requests. Ctrl-C ends it."""
    try:
        pictures = AdminClient(router, token_file).events("/ui/stream")
        if as_json:
            _print(pictures, once=once)
        else:
            _draw(pictures, once=once)
    except (AdminUnavailable, OSError, msgspec.DecodeError) as error:
        messages.fail(messages.unusable_input("the gateway", error))
    except KeyboardInterrupt:
        raise SystemExit(messages.INTERRUPTED) from None


def _print(pictures: Iterator[bytes], *, once: bool) -> None:
    for number, picture in enumerate(pictures):
        if number or not once:
            sys.stdout.write(picture.decode() + "\n")
            sys.stdout.flush()
        if number and once:
            return


def _draw(pictures: Iterator[bytes], *, once: bool) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    if once:
        next(pictures, None)
        console.print(drawn(msgspec.json.decode(next(pictures, b"{}"))))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for picture in pictures:
            live.update(drawn(msgspec.json.decode(picture)), refresh=True)


def drawn(picture: Picture) -> RenderableType:
    """Everything from outside is made printable: names and ids may come from anywhere."""
    return Group(
        Text(printable(wording.headline(picture)), style="bold"),
        Text(wording.numbers(picture["numbers"])),
        Text(),
        _workers(picture["workers"]),
        Text(),
        *_findings(picture["findings"]),
        Text(),
        _flow(picture["flow"]),
    )


def _workers(workers: list[Picture]) -> Table:
    table = _table("worker", "state", "active", "waiting", "KV use", "hit rate", "index", "blocks", "ended")
    for worker in workers:
        table.add_row(
            printable(worker["name"]),
            Text(worker["state"], style=STYLES.get(worker["state"], "bold red")),
            wording.count(worker["active_requests"]),
            wording.count(worker["reported_waiting"]),
            _bar(worker["kv_usage_ratio"]),
            _bar(worker["reported_hit_ratio"]),
            worker["index_state"] or wording.UNAVAILABLE,
            wording.count(worker["index_blocks"]),
            wording.count(worker["requests"]),
        )
    return table


def _findings(findings: list[Picture]) -> Iterator[Text]:
    troubled = [one for one in findings if one["verdict"] in TROUBLE]
    if not troubled:
        yield Text(wording.NO_TROUBLE, style="green")
    for one in troubled:
        where = f"{one['worker']}: " if one["worker"] else ""
        yield Text(printable(f"{one['code']}: {where}{one['detail']}"), style=TROUBLE[one["verdict"]])


def _flow(flow: list[Picture]) -> Table:
    table = _table("last requests", "worker", "why", "hit", "of", "first token", "ended")
    for one in flow:
        table.add_row(
            printable(one["request_id"]),
            printable(one["chosen_worker"] or "-"),
            one["route_reason"],
            wording.count(one["actual_cached_tokens"]),
            wording.count(one["eligible_prefix_tokens"]),
            wording.ms(one["ttft_ms"]),
            Text(one["status"], style="" if one["status"] == "ok" else "red"),
        )
    return table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < 2 or head in ("why", "index") else "right", no_wrap=True)
    return table


def _bar(ratio: float | None) -> str:
    if ratio is None:
        return wording.UNAVAILABLE
    full = round(max(0.0, min(1.0, ratio)) * BAR_CELLS)
    return f"{'#' * full}{'.' * (BAR_CELLS - full)} {ratio:4.0%}"
