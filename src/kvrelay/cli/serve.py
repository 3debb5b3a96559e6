"""`kvrelay serve`: run the gateway until a signal comes, then let open requests end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cli import messages
from kvrelay.cli.gateway_flags import config_reader
from kvrelay.edge.gateway.gateway import Gateway, UnsafeListener
from kvrelay.edge.group.group import Group
from kvrelay.edge.observe.logs import log_to
from kvrelay.edge.system.config import Config, ConfigError
from kvrelay.edge.system.event_loop import calm_the_collector, loop_factory

app = typer.Typer(add_completion=False, rich_markup_mode=None)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Serving = Gateway | Group
EPILOG = "Example: kvrelay serve --worker http://127.0.0.1:8100 --worker http://127.0.0.1:8101 --policy cache_load"


@app.command(epilog=EPILOG)
def serve(
    file: Annotated[
        Path | None, typer.Option("-c", "--config", metavar="FILE", help="Configuration file (default: kvrelay.toml).")
    ] = None,
    worker: Annotated[list[str] | None, typer.Option(metavar="URL", help="A worker; may be repeated.")] = None,
    policy: Annotated[str | None, typer.Option(help="How a worker is chosen; can be switched while running.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the data port.")] = None,
    port: Annotated[int | None, typer.Option(help="The data port; 0 takes a free one.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="The admin port; 0 takes a free one.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line {url, admin_url, pid} on stdout when ready.")
    ] = False,
) -> None:
    """Run the gateway in front of your workers. It may start without any and wait for them.

    SIGTERM and SIGINT drain: no new requests, open ones may end within gateway.drain.grace_s, then exit 0. A second
    signal cuts them at once; their receipts say so. SIGHUP reads the configuration again without dropping a connection.
    """
    read = config_reader(file, workers=worker, policy=policy, host=host, port=port, admin_port=admin_port)
    try:
        config = read()
    except ConfigError as error:
        messages.fail(messages.config_problems(error.problems))
    log_to()
    run(config, read, as_json=as_json)


def run(config: Config, read: Callable[[], Config], *, as_json: bool) -> None:
    """Until a signal; ends the process with a message when the gateway cannot start."""
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(config, read, as_json))
    except UnsafeListener as problem:
        messages.fail(messages.unsafe_listener(str(problem)))
    except (OSError, ImportError, ValueError) as problem:
        messages.fail(messages.gateway_did_not_start(problem))


async def _serve(config: Config, read: Callable[[], Config], as_json: bool) -> None:
    gateway: Serving = Gateway(config) if config.gateway.processes == 1 else Group(config)
    stopping, reloading = _on_stop_signals(), _on_reload_signal()
    async with gateway:
        calm_the_collector()
        messages.say(messages.gateway_ready(gateway.url, gateway.admin_url, config, seed=gateway.seed))
        if as_json:
            ready = {"url": gateway.url, "admin_url": gateway.admin_url, "pid": os.getpid()}
            sys.stdout.write(json.dumps(ready) + "\n")
            sys.stdout.flush()
        reloads = asyncio.create_task(_reload_on_signal(gateway, read, reloading))
        await stopping.acquire()
        reloads.cancel()
        messages.say(messages.gateway_draining(gateway.config.gateway.drain.grace_s))
        await _drain_until_second_signal(gateway, stopping)


async def _reload_on_signal(gateway: Serving, read: Callable[[], Config], asked: asyncio.Event) -> None:
    """One reload after the other; a signal that comes during one leads to one more."""
    while True:
        await asked.wait()
        asked.clear()
        try:
            needs_restart = await gateway.reload(read())
        except ConfigError as problem:
            _say_refused(gateway, problem, messages.config_problems(problem.problems))
        except UnsafeListener as problem:
            _say_refused(gateway, problem, messages.unsafe_listener(str(problem)))
        except (OSError, ValueError) as problem:
            _say_refused(gateway, problem, messages.unusable_input("the configuration", problem))
        else:
            messages.say(messages.config_reloaded(gateway.config_state.generation, needs_restart))


def _say_refused(gateway: Serving, problem: Exception, message: str) -> None:
    gateway.config_state.refused(str(problem))
    messages.say(messages.config_not_reloaded(message, gateway.config_state.generation))


async def _drain_until_second_signal(gateway: Serving, stopping: asyncio.Semaphore) -> None:
    draining = asyncio.ensure_future(gateway.drain())
    impatient = asyncio.ensure_future(stopping.acquire())
    await asyncio.wait((draining, impatient), return_when=asyncio.FIRST_COMPLETED)
    if draining.done():
        cut = draining.result()
    else:
        draining.cancel()
        _leave_signals_to_the_system()
        cut = await gateway.cut_short()
    if cut:
        messages.say(messages.gateway_cut(cut))
    for waiting in (draining, impatient):
        waiting.cancel()
    await asyncio.gather(draining, impatient, return_exceptions=True)


def _on_stop_signals() -> asyncio.Semaphore:
    """Released once per SIGTERM or SIGINT."""
    stopping = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stopping.release)
    return stopping


def _on_reload_signal() -> asyncio.Event:
    """Set by SIGHUP."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    return asked


def _leave_signals_to_the_system() -> None:
    """From here on a signal ends the process at once, in case that our own end hangs."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
