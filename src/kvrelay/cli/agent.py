"""`kvrelay agent`: runs beside a stock worker until a signal comes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
import zmq
from pydantic import ValidationError

from kvrelay.cli import messages
from kvrelay.cli.endpoints import check_endpoint
from kvrelay.edge.agent.host import DEFAULT_INTERVAL_S, DEFAULT_MAX_BLOCKS, AgentHost
from kvrelay.edge.observe.logs import log_to
from kvrelay.edge.system.config import WorkerConfig

app = typer.Typer(add_completion=False, rich_markup_mode=None)

EPILOG = "Example: kvrelay agent --worker http://127.0.0.1:8100 --listen tcp://127.0.0.1:5600"


@app.command(epilog=EPILOG)
def agent(
    worker: Annotated[str, typer.Option(metavar="URL", help="The worker to run beside.")],
    listen: Annotated[
        str,
        typer.Option(help="Where heartbeats are published: auto (a free loopback port), tcp://HOST:PORT, ipc://PATH."),
    ] = "auto",
    snapshots: Annotated[str, typer.Option(help="Where snapshots are served; heartbeats name it.")] = "auto",
    events: Annotated[str, typer.Option(help="Its KV event endpoint; `auto` asks the worker.")] = "auto",
    replay: Annotated[str, typer.Option(help="Its replay endpoint; `auto` asks the worker.")] = "auto",
    topic: Annotated[str, typer.Option(help="Event topic prefix; empty: what the worker says.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key that the worker wants.")] = None,
    interval_s: Annotated[
        float, typer.Option(min=0.05, max=60, help="Seconds between heartbeats.")
    ] = DEFAULT_INTERVAL_S,
    max_blocks: Annotated[
        int, typer.Option(min=1, help="Blocks kept at most; beyond it snapshots say that they are not whole.")
    ] = DEFAULT_MAX_BLOCKS,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow listeners that other machines can reach.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line {worker, agent, snapshots, pid} on stdout when ready.")
    ] = False,
) -> None:
    """Keep a snapshot of a stock worker's live blocks, for routers that start late or lost events.

    The agent subscribes to the worker's KV events like a router does; the worker needs no change. Every second it
    publishes the newest sequence number with the count and a digest of the live blocks, so that a lost last event
    shows, and it answers a router's request with all live blocks in one reply. Name it in the gateway's configuration
    as `agent` of the worker.
    """
    for option, endpoint in (("--listen", listen), ("--snapshots", snapshots)):
        check_endpoint(option, endpoint, insecure=insecure)
    try:
        config = WorkerConfig(url=worker, events=events, replay=replay, topic=topic, api_key_file=api_key_file)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        option = "--" + str(first["loc"][0]).replace("url", "worker")
        received = {"--worker": worker, "--events": events, "--replay": replay}.get(option, first["input"])
        messages.fail(messages.bad_value(option, received, first["msg"], source="the command line"))
    if insecure:
        messages.say(messages.INSECURE_AGENT)
    log_to()
    host = AgentHost(config, listen=listen, snapshots=snapshots, interval_s=interval_s, max_blocks=max_blocks)
    try:
        asyncio.run(_run(host, worker=config.url, as_json=as_json))
    except zmq.ZMQError as problem:
        messages.fail(messages.unusable_endpoint(f"{listen}, {snapshots}", str(problem)))
    except OSError as problem:
        messages.fail(messages.unusable_input("`--api-key-file`", problem))


async def _run(host: AgentHost, *, worker: str, as_json: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with host:
        messages.say(messages.agent_ready(worker, host.endpoint, host.snapshot_endpoint))
        if as_json:
            ready = {"worker": worker, "agent": host.endpoint, "snapshots": host.snapshot_endpoint, "pid": os.getpid()}
            sys.stdout.write(json.dumps(ready) + "\n")
            sys.stdout.flush()
        await stop.wait()
