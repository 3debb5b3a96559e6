"""`kvrelay simulate`: what caches would have hit and where the router would have sent a trace, without an engine."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.messages import simulate as words

if TYPE_CHECKING:
    from kvrelay.lab.sim.cells import Answer, Cell, EventFaults, Restart, Source

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Mode(StrEnum):
    """The three questions a simulation can answer."""

    CAPACITY = "capacity"
    ROUTING = "routing"
    EVENTS = "events"


DEFAULT_CACHES = "lru,fifo,lfu,arc,s3fifo,sieve,vllm,sglang,belady"
DEFAULT_POLICIES = "cache_load,sticky,round_robin"
EXAMPLES = (
    "Example: kvrelay simulate trace.jsonl.gz --blocks 1000,4000 --workers 4 --policy cache_load,sticky; "
    "kvrelay simulate trace.jsonl.gz --mode capacity --cache lru,sieve,belady --html plots.html"
)


@app.command(epilog=EXAMPLES)
def simulate(
    trace: Path | None = typer.Argument(None, help="A trace, or preset:NAME; without it, the bundled agent sessions."),
    mode: Mode = typer.Option(
        Mode.ROUTING, help="capacity: caches alone; routing: our router over engines; events: that with bad streams."
    ),
    workers: int = typer.Option(4, min=1, max=1024, help="Workers, each with its own cache."),
    blocks: str = typer.Option("", help="Room of each worker in blocks of the trace; several: 1000,4000."),
    lower: str = typer.Option("", help="capacity: lower tiers of each worker in blocks, nearest first: 4000,20000."),
    cache: str = typer.Option(DEFAULT_CACHES, help="capacity: eviction policies (also ttl) and engine models."),
    router: str = typer.Option("best_prefix", help="capacity: how requests are spread over several workers."),
    ttl_s: float = typer.Option(300.0, min=0.001, help="capacity: time to live of cache `ttl`."),
    policy: str = typer.Option(DEFAULT_POLICIES, help="routing, events: routing policies."),
    scorer: str = typer.Option("predict", help="routing, events: scorer of cache_load."),
    prefill_tokens_per_s: float = typer.Option(
        20_000.0, min=1, help="routing, events: a hypothesis that decides how many requests are under way at once."
    ),
    max_output_tokens: int = typer.Option(1, min=1, help="routing, events: output beyond this is not generated."),
    event_delay_ms: str = typer.Option("", help="Delay of KV events; several: 1,100,1000."),
    event_spread_ms: float = typer.Option(0.0, min=0, help="Further delay, uniformly up to this: disorder."),
    event_loss: str = typer.Option("", help="Share of event batches that is lost; several: 0,0.01,0.1."),
    event_duplication: float = typer.Option(0.0, min=0, max=1, help="Share that comes twice."),
    replay: bool = typer.Option(True, "--replay/--no-replay", help="Whether workers answer for what was lost."),
    restart: list[str] = typer.Option([], help="WORKER@SECONDS: that worker begins a new life then; repeat it."),
    first_requests: int | None = typer.Option(None, min=1, help="Only the first sessions, until so many requests."),
    measured: Path | None = typer.Option(None, help="Receipts of a real run of this trace: the error is printed."),
    seed: int = typer.Option(1, min=0, max=2**63 - 1, help="The same seed gives the same bytes."),
    jobs: int | None = typer.Option(None, min=1, help="Processes; all cores unless said otherwise."),
    dask: str | None = typer.Option(None, help="Run on a Dask scheduler instead: its address, or `local`."),
    html: Path | None = typer.Option(None, help="Write a page with tables and plots."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object on stdout."),
) -> None:
    """Simulate a trace under virtual time: hit tokens, and a class for every token that was not hit.

    Says nothing about speed. Same call, same digest, on any machine and for any PYTHONHASHSEED.
    """
    from kvrelay.cli.demo import load_trace
    from kvrelay.lab.sim.cells import Source

    made_by_name = trace is not None and str(trace).startswith("preset:")
    load_trace(trace, bundled="without TRACE")
    path = None if trace is None else str(trace) if made_by_name else str(trace.resolve())
    source = Source(path, first_requests)
    sizes = _sizes(source, blocks, workers)
    restarts = tuple(_restart(text, workers) for text in restart)
    cells: list[Cell]
    if mode is Mode.CAPACITY:
        for option, given in (("--event-delay-ms", event_delay_ms), ("--event-loss", event_loss)):
            if given:
                messages.fail(words.other_mode(option, mode, "events"))
        cells = _capacity_cells(source, sizes, workers, cache, router, ttl_s, restarts, lower)
    else:
        if lower:
            messages.fail(words.other_mode("--lower", mode, "capacity"))
        faults = _faults(mode, event_delay_ms, event_spread_ms, event_loss, event_duplication, replay)
        common = {
            "workers": workers,
            "seed": seed,
            "scorer": scorer,
            "prefill_tokens_per_s": prefill_tokens_per_s,
            "max_output_tokens": max_output_tokens,
            "restarts": restarts,
        }
        cells = _routing_cells(source, sizes, policy, scorer, faults, common)
    answers = _run(cells, jobs=jobs, dask=dask)
    _finish(answers, source, measured, html=html, as_json=json, seed=seed)


# --- cells -----------------------------------------------------------------------------------------------------------


def _sizes(source: Source, given: str, workers: int) -> list[int]:
    """As given; else three: a twentieth, a fifth and all of the distinct blocks, over all workers together."""
    from kvrelay.lab.sim.cells import cache_trace

    trace = cache_trace(source)
    longest = max((len(request.blocks) + 2 for request in trace.requests), default=1)
    if given:
        sizes = [int(value) for value in _numbers("--blocks", given, low=1, high=2**24)]
    else:
        sizes = [max(longest, trace.distinct_blocks * share // (100 * workers)) for share in (5, 20, 100)]
    for size in sizes:
        if size < longest:
            sys.stderr.write(words.too_small(size, longest) + "\n")
    return list(dict.fromkeys(sizes))


def _capacity_cells(
    source: Source,
    sizes: list[int],
    workers: int,
    cache: str,
    router: str,
    ttl_s: float,
    restarts: tuple[Restart, ...],
    lower: str,
) -> list[Cell]:
    from kvrelay.core.cachesim.engines import ENGINES
    from kvrelay.lab.sim.cells import CACHES, SIMPLE_ROUTERS, CapacityCell

    if router not in SIMPLE_ROUTERS:
        messages.fail(messages.unknown_name("router", router, SIMPLE_ROUTERS, source="`--router`"))
    names = _names("cache", cache, CACHES, option="--cache")
    tiers = tuple(int(value) for value in _numbers("--lower", lower, low=1, high=2**30)) if lower else ()
    return [
        CapacityCell(
            source,
            name,
            size,
            workers=workers,
            router=router,
            ttl_s=ttl_s,
            restarts=restarts,
            lower_blocks=() if name in ENGINES else tiers,
        )
        for name in names
        for size in sizes
    ]


def _routing_cells(
    source: Source,
    sizes: list[int],
    policy: str,
    scorer: str,
    faults: list[EventFaults],
    common: dict[str, Any],
) -> list[Cell]:
    from typing import get_args

    from kvrelay.edge.system.sections import PolicyName, ScorerName
    from kvrelay.lab.sim.cells import RoutingCell

    if scorer not in get_args(ScorerName):
        messages.fail(messages.unknown_name("scorer", scorer, get_args(ScorerName), source="`--scorer`"))
    names = _names("policy", policy, get_args(PolicyName), option="--policy")
    return [
        RoutingCell(source, name, size, events=fault, **common) for name in names for size in sizes for fault in faults
    ]


def _faults(
    mode: Mode, delays_ms: str, spread_ms: float, losses: str, duplication: float, replay: bool
) -> list[EventFaults]:
    """In mode `events`, where nothing is said, a short list of delays and losses."""
    from kvrelay.lab.sim.cells import EventFaults

    if mode is Mode.EVENTS and not (delays_ms or losses or spread_ms or duplication):
        return [
            EventFaults(),
            EventFaults(delay_ms=100.0),
            EventFaults(delay_ms=1_000.0, spread_ms=2_000.0),
            EventFaults(loss=0.01),
            EventFaults(loss=0.1),
            EventFaults(loss=0.1, replay=False),
        ]
    delays = _numbers("--event-delay-ms", delays_ms, low=0, high=3.6e6) if delays_ms else [EventFaults().delay_ms]
    lost = _numbers("--event-loss", losses, low=0, high=1) if losses else [0.0]
    return [EventFaults(delay, spread_ms, loss, duplication, replay) for delay in delays for loss in lost]


def _restart(text: str, workers: int) -> Restart:
    from kvrelay.lab.sim.cells import Restart

    worker, _, seconds = text.partition("@")
    try:
        found = Restart(float(seconds), int(worker))
    except ValueError:
        found = Restart(-1.0, -1)
    if not (0 <= found.worker < workers and 0 <= found.at_s < 1e9):
        legal = f"WORKER@SECONDS with a worker from 0 to {workers - 1}, such as 0@600"
        messages.fail(messages.bad_value("restart", text, legal, source="`--restart`"))
    return found


def _names(kind: str, text: str, legal: tuple[str, ...], *, option: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in legal:
            messages.fail(messages.unknown_name(kind, name, legal, source=f"`{option}`"))
    return names


def _numbers(option: str, text: str, *, low: float, high: float) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(low <= value <= high for value in values):
        legal = f"numbers from {low:g} to {high:g}, separated by commas"
        messages.fail(words.bad_number_list(option, text, legal))
    return values


# --- running and telling ---------------------------------------------------------------------------------------------


def _run(cells: list[Cell], *, jobs: int | None, dask: str | None) -> list[Answer]:
    from kvrelay.lab.sim.sweep import ClusterUnreachable, DaskMissing, run_cells

    def said(done: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r" + words.progress(done, len(cells)) + ("\n" if done == len(cells) else ""))

    try:
        return run_cells(cells, jobs=jobs, dask=dask, on_answer=said)
    except DaskMissing as problem:
        messages.fail(words.dask_missing(str(problem)))
    except ClusterUnreachable as problem:
        messages.fail(words.no_cluster(str(problem)))


def _finish(
    answers: list[Answer], source: Source, measured: Path | None, *, html: Path | None, as_json: bool, seed: int
) -> None:
    from kvrelay.lab.report.paper import render_paper
    from kvrelay.lab.sim import story
    from kvrelay.lab.sim.cells import cut_trace, load_source
    from kvrelay.lab.sim.sweep import digest

    file, trace = load_source(source), cut_trace(source)
    validation = None if measured is None else _validated(answers, measured)
    validation_words = words.NOT_VALIDATED if validation is None else words.validated(validation)
    summed = digest(answers)
    notes = (*trace.limitations(), *trace.notices)
    if html is not None:
        facts = (
            ("trace", f"{file.name}, sha256 {file.sha256}"),
            ("requests", f"{trace.requests:,} of {trace.input_tokens:,} prompt tokens"),
            ("block", f"{trace.block_size_tokens} tokens"),
            ("seed", str(seed)),
            ("digest", summed),
        )
        page = render_paper(story.paper(answers, facts=facts, notes=notes, validation=validation_words))
        _write(html, page)
    if as_json:
        result = {
            "label": story.LABEL,
            "trace": {"name": file.name, "sha256": file.sha256, "block_size_tokens": trace.block_size_tokens},
            "digest": summed,
            "validation": validation_words,
            "validation_error": None if validation is None else validation.error,
            "limits": [*story.limits(answers), *notes],
            "cells": answers,
        }
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        return
    found = [story.hit_table(answers), story.count_table(answers), story.claim_table(answers)]
    sys.stdout.write(words.tables([table for table in found if table is not None]))
    sys.stdout.write("\n" + words.digest(summed) + "\n")
    for line in (validation_words, *story.limits(answers), *notes):
        sys.stderr.write(line + "\n")
    if html is not None:
        sys.stderr.write(words.page_written(html) + "\n")


def _validated(answers: list[Answer], measured: Path) -> Any:
    from kvrelay.edge.observe.receipt_file import BadReceipt, read_receipts
    from kvrelay.lab.sim.story import Validation

    try:
        receipts = [receipt for receipt in read_receipts(measured) if receipt.actual_cached_tokens is not None]
    except (OSError, BadReceipt) as problem:
        messages.fail(messages.unusable_input(str(measured), problem))
    if len(answers) != 1:
        messages.fail(words.many_measured(sorted({receipt.policy for receipt in receipts})))
    hit_tokens = sum(receipt.actual_cached_tokens or 0 for receipt in receipts)
    return Validation(len(receipts), hit_tokens, answers[0].hit_tokens)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as problem:
        messages.fail(messages.unwritable_folder(path, problem.strerror or str(problem)).replace("`--out`", "`--html`"))
