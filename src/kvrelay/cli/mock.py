"""`kvrelay mock`: run mock workers, each its own OS process, until a signal comes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.core.contract.fields import Contract
from kvrelay.edge.worker.faults import FaultError, parse_fault
from kvrelay.edge.worker.launch import MockFleet, RunningWorker, WorkerStartError
from kvrelay.edge.worker.spec import MockSpec, spec_problems
from kvrelay.edge.worker.supervisor import Supervisor

app = typer.Typer(add_completion=False, rich_markup_mode=None)

DEFAULT_PORT = 8100
MAX_WORKERS = 64
MAX_PORT = 65_535
OPTION_OF_MEMBER = {"block_size_tokens": "--block-size", "replay_buffer_batches": "--replay-buffer"}
EXAMPLE_FAULT = '{"kind": "delay", "ms": 200}'
EPILOG = "Example: kvrelay mock --workers 4 --port 0 --json"


@app.command(epilog=EPILOG)
def mock(
    workers: Annotated[int, typer.Option(help="How many worker processes.")] = 1,
    port: Annotated[
        int, typer.Option(help="Port of the first worker, the others follow; 0 takes free ones.")
    ] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    name_prefix: Annotated[str, typer.Option(help="Workers are called PREFIX-0, PREFIX-1, ...")] = "mock",
    model: Annotated[str, typer.Option(help="Name of the base model.")] = "mock-model",
    adapter: Annotated[list[str] | None, typer.Option(help="Name of a LoRA adapter; may be repeated.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Token ids of prompts are below this.")] = 200_000,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    blocks: Annotated[int, typer.Option(help="KV blocks of each worker.")] = 4096,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context length; default: what the blocks hold, at most 32768.")
    ] = None,
    prefill_tokens_per_s: Annotated[float, typer.Option(help="Stated prefill rate.")] = 8000.0,
    decode_ms: Annotated[float, typer.Option(help="Stated duration of one decode step.")] = 8.0,
    step_overhead_ms: Annotated[float, typer.Option(help="Added to every engine step.")] = 0.2,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 128,
    token_budget: Annotated[int, typer.Option(help="Tokens that one engine step computes at most.")] = 2048,
    events: Annotated[
        str,
        typer.Option(
            help="KV event endpoint: auto (a free loopback port), none, or tcp://HOST:PORT. The worker binds it, also "
            "when it names 127.0.0.1 (vLLM would connect); with several workers the port counts up."
        ),
    ] = "auto",
    events_mode: Annotated[str, typer.Option(help="bind or connect.")] = "bind",
    replay: Annotated[
        str, typer.Option(help="Replay endpoint: auto, none, or tcp://HOST:PORT; always bound.")
    ] = "auto",
    replay_buffer: Annotated[int, typer.Option(help="Event batches kept for replay.")] = 10_000,
    hash_seed: Annotated[str, typer.Option(help="Workers with the same seed name blocks alike.")] = "0",
    seed: Annotated[int, typer.Option(help="Chance of faults that have a probability.")] = 0,
    drain_s: Annotated[float, typer.Option(help="How long running requests may go on after SIGTERM.")] = 30.0,
    fault: Annotated[
        list[str] | None, typer.Option(help=f"A fault from the start, e.g. '{EXAMPLE_FAULT}'; may be repeated.")
    ] = None,
    store: Annotated[
        list[str] | None,
        typer.Option(help="URL of a tier to share KV through, e.g. file:///tmp/kv; may be repeated, nearest first."),
    ] = None,
    store_chunk_blocks: Annotated[int, typer.Option(help="Blocks that are stored and loaded together.")] = 16,
    store_deadline_ms: Annotated[float, typer.Option(help="Longest wait for a load from the store.")] = 50.0,
    contract: Annotated[
        list[str] | None,
        typer.Option(help="FIELD=VALUE of the compatibility contract that differs here; may be repeated."),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start a worker again when it ends.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow listeners that other machines can reach; there is no TLS.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line per ready worker on stdout.")] = False,
) -> None:
    """Run mock workers: an engine without a model, with real paging, events, metrics and faults.

    Each worker is its own OS process with a new incarnation id at every start. SIGTERM or Ctrl-C drains them all.
    """
    if not 1 <= workers <= MAX_WORKERS:
        messages.fail(messages.bad_value("--workers", workers, f"1 to {MAX_WORKERS}", source="the command line"))
    if port <= MAX_PORT < port + workers - 1:
        legal = f"0 to {MAX_PORT - workers + 1}, because the ports of {workers} workers follow one another"
        messages.fail(messages.bad_value("--port", port, legal, source="the command line"))
    template = MockSpec(
        name=name_prefix,
        host=host,
        port=port,
        model=model,
        adapters=tuple(adapter or ()),
        vocab_size=vocab_size,
        block_size_tokens=block_size,
        blocks=blocks,
        max_model_len=max_model_len,
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_ms=decode_ms,
        step_overhead_ms=step_overhead_ms,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        events=events,
        events_mode=events_mode,
        replay=replay,
        replay_buffer_batches=replay_buffer,
        hash_seed=hash_seed,
        seed=seed,
        drain_s=drain_s,
        insecure=insecure,
        faults=_read_faults(fault or []),
        store=_tiers(store or [], deadline_ms=store_deadline_ms),
        store_chunk_blocks=store_chunk_blocks,
        contract=_contract(contract or []),
    )
    _check(template)
    raise SystemExit(_run([template.numbered(i) for i in range(workers)], restart=restart, as_json=as_json))


def _read_faults(texts: list[str]) -> tuple[dict[str, Any], ...]:
    faults = []
    for text in texts:
        try:
            received = json.loads(text)
            parse_fault(received if isinstance(received, dict) else {})
        except json.JSONDecodeError as error:
            messages.fail(messages.bad_fault(text, f"not JSON: {error}; legal: {EXAMPLE_FAULT}"))
        except FaultError as error:
            messages.fail(messages.bad_fault(text, str(error)))
        faults.append(received)
    return tuple(faults)


def _tiers(urls: list[str], *, deadline_ms: float) -> dict[str, Any] | None:
    return {"tiers": [{"url": url} for url in urls], "deadline_ms": deadline_ms} if urls else None


def _contract(pairs: list[str]) -> dict[str, Any]:
    """Values of contract members; `block_size` is the only number."""
    members: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in Contract.__struct_fields__:
            legal = f"FIELD=VALUE with one of {', '.join(Contract.__struct_fields__)}"
            messages.fail(messages.bad_value("--contract", pair, legal, source="the command line"))
        members[name] = int(value) if name == "block_size" and value.isdigit() else value
    return members


def _check(spec: MockSpec) -> None:
    problems = [
        messages.bad_value(_option(problem.member), problem.received, problem.legal, source="the command line")
        for problem in spec_problems(spec)
    ]
    if problems:
        messages.fail("\n".join(problems))
    if spec.insecure:
        messages.say(messages.INSECURE_MOCK)


def _option(member: str) -> str:
    return OPTION_OF_MEMBER.get(member, "--" + member.replace("_", "-"))


def _run(specs: list[MockSpec], *, restart: bool, as_json: bool) -> int:
    fleet = MockFleet(specs)
    try:
        fleet.start()
    except WorkerStartError as error:
        messages.fail(messages.mock_did_not_start(str(error)), messages.USAGE_ERROR)
    except KeyboardInterrupt:
        return messages.INTERRUPTED
    for worker in fleet.workers:
        _print_ready(worker, as_json=as_json)
    supervisor = Supervisor(
        fleet,
        restart=restart,
        on_ended=lambda worker, status: messages.say(messages.mock_ended(worker.name, worker.pid, status)),
        on_restarted=lambda worker: _print_ready(worker, as_json=as_json),
        on_restart_failed=lambda worker, error: messages.say(messages.mock_did_not_start(str(error))),
    )
    if asyncio.run(supervisor.run()):
        return messages.OK
    messages.say(messages.NO_MOCK_LEFT)
    return messages.VERDICT_FAIL


def _print_ready(worker: RunningWorker, *, as_json: bool) -> None:
    """A reader that has gone away is no reason to stop serving."""
    line = msgspec.json.encode(worker.ready).decode() if as_json else messages.mock_ready(worker.ready)
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass
