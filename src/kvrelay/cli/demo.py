"""`kvrelay demo`: the whole story on mock workers."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import typer

from kvrelay.cli import messages

app = typer.Typer(add_completion=False, rich_markup_mode=None)

DEFAULT_OUT = Path("kvrelay-demo")
Answer = TypeVar("Answer")


@app.command(
    epilog="Example: kvrelay demo --repeats 1 --policies round_robin,cache_load --out /tmp/first-look",
)
def demo(
    trace: Path | None = typer.Option(None, help="Agent sessions or Mooncake rows, plain or .gz. Default: bundled."),
    workers: int = typer.Option(4, min=1, max=16, help="Mock workers, each its own process."),
    repeats: int = typer.Option(3, min=1, max=20, help="Arms per policy; below 3 the evidence is `insufficient`."),
    policies: str = typer.Option("round_robin,sticky,cache_load", help="Comma-separated, first to run first."),
    seed: int = typer.Option(1, help="Of the prompts; the same seed gives the same bytes."),
    out: Path = typer.Option(DEFAULT_OUT, help="Folder for manifest, receipts, samples and report."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object on stdout."),
) -> None:
    """Replay a real agent trace through the real gateway over mock workers, once per policy and repeat, and compare."""
    from kvrelay.cli.arm_progress import ArmProgress
    from kvrelay.lab.demo.demo import run_demo
    from kvrelay.lab.demo.settings import settings_for

    source = load_trace(trace)
    settings = settings_for(source.trace, workers=workers, repeats=repeats, policies=policy_names(policies), seed=seed)
    make_folder(out)
    with ArmProgress() as progress:
        run = run_to_end(run_demo(source, settings, out=out, watcher=progress))
    _finish(run, out, as_json=json)


def load_trace(path: Path | None, *, bundled: str = "without `--trace`") -> Any:
    """Ends the process with a message when the file is not a trace; `bundled` says how to do without one."""
    from kvrelay.core.traces.trace import NO_SCOPE, NotTold, TraceError
    from kvrelay.lab.replay.trace_file import bundled_trace, read_trace

    try:
        source = bundled_trace() if path is None else read_trace(path)
    except OSError as problem:
        messages.fail(messages.unreadable_trace(path, problem.strerror or str(problem), bundled=bundled))
    except NotTold as problem:
        messages.fail(messages.untold_trace(path, problem.line, problem.found, problem.legal, problem.option))
    except TraceError as problem:
        messages.fail(messages.bad_trace(path, problem.line, problem.found, problem.legal))
    if source.trace.hash_scope == NO_SCOPE:
        messages.fail(
            messages.bad_trace(path, 1, "no block ids, so no prompt shares anything", "a trace with block ids")
        )
    return source


def policy_names(text: str, *, source: str = "`--policies`") -> tuple[str, ...]:
    from kvrelay.edge.system.sections import PolicyName

    legal = get_args(PolicyName)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in legal:
            messages.fail(messages.unknown_name("policy", name, legal, source=source))
    if not names:
        messages.fail(messages.bad_value("policies", text, "at least one policy name", source=source))
    return names


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        messages.fail(messages.unwritable_folder(out, problem.strerror or str(problem)))


def run_to_end(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Runs `work`; on Ctrl-C or SIGTERM everything that it started is stopped first, then the process ends with 130 or
    143. Arms that cannot be run (a port, a process, a primer) end it with a message."""
    from kvrelay.cli.messages import replay as words
    from kvrelay.core.traces.trace import TraceError
    from kvrelay.edge.worker.launch import WorkerStartError
    from kvrelay.lab.arms.arm import PrimerError, ResetRefused
    from kvrelay.lab.arms.fleets import FleetUnusable
    from kvrelay.lab.arms.gateway_process import GatewayStartError
    from kvrelay.lab.arms.measure import PlanRefused
    from kvrelay.lab.arms.order import OrderRefused

    terminated = False

    async def guarded() -> Answer:
        def stop() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        task = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        return await task

    try:
        return asyncio.run(guarded())
    except KeyboardInterrupt:
        messages.fail(messages.STOPPED, code=128 + signal.SIGINT)
    except asyncio.CancelledError:
        messages.fail(messages.STOPPED, code=128 + (signal.SIGTERM if terminated else signal.SIGINT))
    except TraceError as problem:
        messages.fail(messages.bad_trace(None, problem.line, problem.found, problem.legal))
    except PlanRefused as problem:
        messages.fail(words.plan_refused(str(problem)))
    except OrderRefused as problem:
        messages.fail(words.order_refused(str(problem)))
    except ResetRefused as problem:
        messages.fail(words.reset_was_refused(str(problem)))
    except (WorkerStartError, GatewayStartError, PrimerError, FleetUnusable) as problem:
        messages.fail(messages.arm_failed(str(problem)), code=messages.UNKNOWN)


def _finish(run: Any, out: Path, *, as_json: bool) -> None:
    from kvrelay.lab.arms.results import sent_late
    from kvrelay.lab.report.files import summary, write_files
    from kvrelay.lab.report.story import receipt_in_words
    from kvrelay.lab.report.view import overview_table

    write_files(run, out)
    results, ranking = run.measured.results, run.ruling.ranking
    if as_json:
        sys.stdout.write(msgspec.json.encode(summary(run)).decode() + "\n")
    else:
        table = overview_table(results, winner=ranking.winner).transposed().text()
        sys.stdout.write(
            messages.demo_story(
                table, run.ruling.ranking.won, run.ruling.ranking.why, receipt_in_words(run.measured), out
            )
        )
    for policy, result in results.items():
        if sent_late(result):
            messages.say(messages.sender_was_late(policy, result.send_lag_ms.p99))
    complain(run.measured)
    if ranking.evidence == "none" and len(results) > 1:
        messages.fail(messages.demo_complaints([ranking.why]), code=messages.UNKNOWN)


def complain(measured: Any) -> None:
    """Ends the process when something happened that must not, or when too much is unknown."""
    complaints = problems(measured)
    if complaints:
        messages.fail(messages.demo_complaints(complaints), code=messages.VERDICT_FAIL)
    unknown = [
        f"{policy}: the hits of {result.requests_without_usage} requests are unknown"
        for policy, result in measured.results.items()
        if result.requests_without_usage
    ]
    if unknown:
        messages.fail(messages.demo_complaints(unknown), code=messages.UNKNOWN)


def problems(measured: Any) -> Sequence[str]:
    """What must not happen in a demo: each of these makes the exit status 1."""
    found = []
    for policy, result in measured.results.items():
        for count, what in (
            (result.failures, "requests failed"),
            (result.unreconciled_requests, "receipts whose hits and losses do not add up"),
            (result.usage_disagreements, "receipts that disagree with what the client read"),
        ):
            if count:
                found.append(f"{policy}: {count} {what}")
    return found + [
        f"{facts.arm} left behind: {item}" for facts in measured.manifest.observed for item in facts.leftovers
    ]
