"""`kvrelay chaos`: proxies that put faults on the wire, for anybody's drills."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import zmq

from kvrelay.cli import chaos_tcp, messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.endpoints import check_endpoint
from kvrelay.edge.chaos.events import EventProxy
from kvrelay.edge.chaos.stream import Action
from kvrelay.edge.chaos.words import ScriptError

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Fault proxies: put one between a worker and the gateway, and see what it does about it.",
)

EPILOG = (
    "Example: kvrelay chaos events --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558"
    " --do 'drop 17; delay 30 2s'"
)


@app.callback()
def chaos() -> None:
    """Every kind of proxy is a command of its own."""


app.command(epilog=chaos_tcp.EPILOG, short_help="Faults on the path to any TCP service, by script.")(chaos_tcp.tcp)


@app.command(epilog=EPILOG, short_help="Faults in a worker's KV event stream, by script.")
def events(
    upstream: Annotated[
        str, typer.Option("--events", metavar="ENDPOINT", help="The publisher; bind: before it if the worker connects.")
    ],
    replay: Annotated[str | None, typer.Option(metavar="ENDPOINT", help="The worker's replay endpoint.")] = None,
    no_replay: Annotated[
        bool, typer.Option("--no-replay", help="Offer no replay, whatever the worker offers.")
    ] = False,
    listen: Annotated[
        str, typer.Option(help="For subscribers: auto, tcp://HOST:PORT, ipc://PATH; connect: before it if they listen.")
    ] = "auto",
    listen_replay: Annotated[
        str, typer.Option(help="For replay requests: auto, tcp://HOST:PORT, ipc://PATH.")
    ] = "auto",
    script: Annotated[Path | None, typer.Option(metavar="FILE", help="Instructions, one a line.")] = None,
    do: Annotated[
        list[str] | None, typer.Option(metavar="INSTRUCTIONS", help="The same, inline; may be repeated.")
    ] = None,
    passed: Annotated[bool, typer.Option("--passed", help="Print batches that pass untouched as well.")] = False,
    wait_s: Annotated[
        float, typer.Option(min=0, help="How long to wait for the publisher before saying ready.")
    ] = 10.0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow listeners that other machines can reach.")
    ] = False,
) -> None:
    """Drop, delay, duplicate, reorder and hold a worker's KV event batches by sequence number.

    Instructions: drop 17, drop 20-25, drop tail, delay 30 2s, duplicate 7, reorder 10 12, hold 40 until release,
    hold 40- until 45, release, clear; replay off, on, drop 17, last 5, delay 2s, cut 3. More of them can be typed (or
    piped) into standard input while it runs.

    On standard output: one JSON line {events, replay, pid} when ready, then one per action.
    """
    for option, endpoint in (("--listen", listen), ("--listen-replay", listen_replay)):
        check_endpoint(option, endpoint.removeprefix("connect:"), insecure=insecure or endpoint.startswith("connect:"))
    if upstream.startswith("bind:"):
        check_endpoint("--events", upstream.removeprefix("bind:"), insecure=insecure)
    try:
        text = "\n".join([*([script.read_text(encoding="utf-8")] if script else []), *(do or [])])
        proxy = EventProxy(
            upstream,
            replay=None if no_replay else replay,
            listen=listen,
            listen_replay=listen_replay,
            script=text,
            on_action=lambda at_s, action: _print_action(at_s, action, passed=passed),
        )
        with proxy:
            _serve(proxy, upstream, wait_s)
    except ScriptError as problem:
        messages.fail(messages.bad_script(str(script or "--do"), str(problem)))
    except (OSError, UnicodeDecodeError) as problem:  # zmq's errors are not among them
        messages.fail(messages.unusable_input(f"script `{script}`", problem))
    except zmq.ZMQError as problem:
        messages.fail(messages.unusable_endpoint(f"{upstream}, {listen}, {listen_replay}", str(problem)))


def _serve(proxy: EventProxy, upstream: str, wait_s: float) -> None:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    if not proxy.wait_until_connected(wait_s):
        messages.say(messages.publisher_missing(upstream, wait_s))
    _print({"events": proxy.events, "replay": proxy.replay, "pid": os.getpid()})
    threading.Thread(target=_obey_input, args=(proxy,), daemon=True).start()
    stopping.wait()


def _obey_input(proxy: EventProxy) -> None:
    """Until the input ends; the proxy goes on without it."""
    for line in sys.stdin:
        try:
            proxy.do(line)
        except ScriptError as problem:
            messages.say(messages.bad_script("standard input", str(problem)))


def _print_action(at_s: float, action: Action, *, passed: bool) -> None:
    if passed or action.action != "pass":
        _print({"t_s": round(at_s, 4), **msgspec.to_builtins(action)})


def _print(line: dict[str, object]) -> None:
    """A reader that has gone away is no reason to stop."""
    try:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass
