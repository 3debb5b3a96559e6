"""`kvrelay chaos tcp`: a proxy that puts faults on the path to any TCP service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.endpoints import check_endpoint
from kvrelay.cli.messages import chaos_tcp as words
from kvrelay.edge.chaos.tcp import TcpAction, TcpProxy
from kvrelay.edge.chaos.tcp_control import serve_control
from kvrelay.edge.chaos.words import ScriptError

EPILOG = "Example: kvrelay chaos tcp --to 127.0.0.1:8100 --do 'latency 20ms; at 5s blackhole for 3s'"


def tcp(
    to: Annotated[str, typer.Option("--to", metavar="HOST:PORT", help="The service behind the proxy.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="For clients; port 0 takes a free one.")] = (
        "127.0.0.1:0"
    ),
    control: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Take instructions by HTTP here too: GET /, POST /.")
    ] = None,
    script: Annotated[Path | None, typer.Option(metavar="FILE", help="Instructions, one a line.")] = None,
    do: Annotated[
        list[str] | None, typer.Option(metavar="INSTRUCTIONS", help="The same, inline; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow listeners that other machines can reach.")
    ] = False,
) -> None:
    """Delay, throttle, stall, lose, cut and refuse the connections to any TCP service.

    Instructions: latency 50ms jitter 10ms, bandwidth 64kB/s, stall, blackhole, refuse, reset, reset after N,
    truncate N, half-close, half-close after N, clear; `up` or `down` before one for a single direction, `at 2s` for
    later, `for 3s` behind it for how long. More of them can be typed (or piped) into standard input while it runs.

    On standard output: one JSON line {address, control, pid} when ready, then one per connection and blow.
    """
    upstream = _address("--to", to)
    for option, address in (("--listen", listen), ("--control", control)):
        if address is not None:
            check_endpoint(option, f"tcp://{address}", insecure=insecure)
    try:
        text = "\n".join([*([script.read_text(encoding="utf-8")] if script else []), *(do or [])])
        host, port = _address("--listen", listen)
        proxy = TcpProxy(*upstream, listen_host=host, listen_port=port, script=text, seed=seed, on_action=_print_action)
    except ScriptError as problem:
        messages.fail(messages.bad_script(str(script or "--do"), str(problem)))
    except (OSError, UnicodeDecodeError) as problem:
        messages.fail(messages.unusable_input(f"script `{script}`", problem))
    control_at = None if control is None else _address("--control", control)
    try:
        asyncio.run(_serve(proxy, to, control_at))
    except OSError as problem:
        messages.fail(words.cannot_listen(" or ".join(filter(None, (listen, control))), str(problem)))


async def _serve(proxy: TcpProxy, upstream: str, control_at: tuple[str, int] | None) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with proxy:
        control, runner = None, None
        if control_at is not None:
            runner, port = await serve_control(proxy, *control_at)
            control = f"http://{control_at[0]}:{port}/"
        messages.say(words.listening(proxy.address, upstream, control))
        _print({"address": proxy.address, "control": control, "pid": os.getpid()})
        threading.Thread(target=_obey_input, args=(proxy, loop), daemon=True).start()
        try:
            await stopping.wait()
        finally:
            if runner is not None:
                await runner.cleanup()


def _obey_input(proxy: TcpProxy, loop: asyncio.AbstractEventLoop) -> None:
    """Until the input ends; the proxy goes on without it."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(_obey, proxy, line)


def _obey(proxy: TcpProxy, line: str) -> None:
    try:
        proxy.do(line)
    except ScriptError as problem:
        messages.say(messages.bad_script("standard input", str(problem)))


def _address(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        messages.fail(messages.bad_value(option, text, "HOST:PORT, such as 127.0.0.1:8100", source="the command line"))
    return host.strip("[]"), int(port)


def _print_action(at_s: float, action: TcpAction) -> None:
    known = {name: value for name, value in msgspec.to_builtins(action).items() if value not in (None, "")}
    _print({"t_s": round(at_s, 4), **known})


def _print(line: dict[str, object]) -> None:
    """A reader that has gone away is no reason to stop."""
    try:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass
