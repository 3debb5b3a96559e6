"""All wording that people see on the command line: what was received, what is legal, the one next thing to try."""

from __future__ import annotations

import difflib
import errno
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from kvrelay.core.traces.plan import Plan
    from kvrelay.edge.connectors.survey import Survey
    from kvrelay.edge.system.config import Config, Problem
    from kvrelay.edge.worker.spec import MockReady
    from kvrelay.lab.arms.manifest import ArmFacts

OK, VERDICT_FAIL, USAGE_ERROR, UNKNOWN = 0, 1, 2, 3
"""Exit codes, the same for every command."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def fail(message: str, code: int = USAGE_ERROR) -> NoReturn:
    """Print `message` on stderr and end the process with `code`."""
    sys.stderr.write(message.rstrip("\n") + "\n")
    raise SystemExit(code)


def unknown_name(kind: str, received: str, legal: Iterable[str], *, source: str) -> str:
    """`unknown KIND` with the legal names and the nearest one."""
    names = sorted(legal)
    lines = [f"error: unknown {kind} `{received}` (from {source})"]
    lines.append(f"  known {_plural(kind)}: " + ", ".join(f"`{name}`" for name in names))
    nearest = difflib.get_close_matches(received, names, n=1, cutoff=0.5)
    if nearest:
        lines.append(f"hint: did you mean `{nearest[0]}`?")
    return "\n".join(lines)


def bad_value(name: str, received: object, legal: str, *, source: str) -> str:
    """A value out of its legal range."""
    return f"error: `{name}` is `{received}` (from {source})\n  legal: {legal}"


def missing_argument(name: str, command: str) -> str:
    """A command was called without something that it needs."""
    return f"error: `{command}` needs {name}, which was not given\nhint: {command} --help"


def bad_usage(detail: str, command: str) -> str:
    """Any other call that a command cannot take."""
    return f"error: {detail[:1].lower()}{detail[1:].rstrip('.')} (from `{command}`)\nhint: {command} --help"


def _plural(noun: str) -> str:
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


def config_problems(problems: Iterable[Problem]) -> str:
    """Everything that is wrong with a configuration, one block each."""
    return "\n".join(_config_problem(problem) for problem in problems)


def _config_problem(problem: Problem) -> str:
    match problem.kind:
        case "unknown_key":
            lines = [f"error: unknown key `{problem.key}` (from {problem.source})"]
            lines.append("  known here: " + ", ".join(f"`{name}`" for name in problem.known))
        case "unsupported":
            lines = [f"error: `{problem.key}` is `{problem.received}` (from {problem.source})"]
            lines.append(f"  not supported in this version; supported: {problem.legal}")
        case "unreadable":
            lines = [
                f"error: cannot read the configuration file `{problem.key}` (from {problem.source})",
                f"  {problem.legal}",
            ]
        case "duplicate":
            lines = [
                f"error: two workers have the {problem.received} (from {problem.source})",
                f"  legal: {problem.legal}",
            ]
        case "missing":
            lines = [f"error: `{problem.key}` is missing (from {problem.source})", f"  legal: {problem.legal}"]
        case _:
            lines = [bad_value(problem.key, problem.received, problem.legal, source=problem.source)]
    if problem.nearest:
        lines.append(f"hint: did you mean `{problem.nearest}`?")
    return "\n".join(lines)


def receipt_not_in_memory(request_id: str, *, router: str) -> str:
    """The gateway does not have it, or not any more."""
    return (
        f"error: no receipt `{request_id}` in {router}\n"
        "  a running gateway keeps only the last receipts in memory\n"
        "hint: look into the receipt file with `--file`"
    )


def receipt_not_in_file(request_id: str, *, file: object) -> str:
    return (
        f"error: no receipt `{request_id}` in {file}\n"
        "  older receipts are in the rotated files beside it (.1 is the newest of them)\n"
        f"hint: kvrelay receipts tail {file} shows the ids of its last receipts"
    )


def no_receipt_source() -> str:
    """Neither a file nor a gateway was named."""
    return (
        "error: nowhere to look for receipts\n"
        "  legal: FILE or FILE:LINE, `--file FILE`, or `--router URL` of a gateway's admin port\n"
        "hint: kvrelay receipts tail --router http://127.0.0.1:8001"
    )


def unusable_input(what: str, problem: Exception) -> str:
    """A file or an answer could not be read or is not what it should be."""
    return f"error: cannot use {what}\n  {_reason(problem)}"


def _reason(problem: Exception) -> str:
    """An error of the system without its number, and with the file that it is about."""
    if not isinstance(problem, OSError) or problem.strerror is None:
        return str(problem)
    return problem.strerror if problem.filename is None else f"{problem.filename}: {problem.strerror}"


def say(message: str) -> None:
    """Print `message` on stderr and go on."""
    sys.stderr.write(message.rstrip("\n") + "\n")
    sys.stderr.flush()


# --- kvrelay mock ------------------------------------------------------------------------------------------------

INSECURE_MOCK = "warning: `--insecure` is on: whoever reaches these ports can use, see and break the mock workers"
NO_MOCK_LEFT = "error: every mock worker has ended, nothing is left to run\nhint: `--restart` starts them again"


def mock_ready(ready: MockReady) -> str:
    """One line for people."""
    events = "no events" if ready.events is None else f"events {ready.events}"
    replay = "" if ready.replay is None else f", replay {ready.replay}"
    return f"{ready.name}  {ready.url}  {events}{replay}  pid {ready.pid}  incarnation {ready.incarnation}"


def mock_ended(name: str, pid: int, exit_status: int) -> str:
    """A worker is gone although nobody asked for it here."""
    how = f"was killed by signal {-exit_status}" if exit_status < 0 else f"ended with status {exit_status}"
    return f"warning: worker `{name}` (pid {pid}) {how}; the others go on"


def mock_did_not_start(detail: str) -> str:
    return f"error: {detail}\n  its reason stands above\nhint: if the port is taken, use `--port 0` for free ones"


def bad_fault(received: str, detail: str) -> str:
    return f"error: `--fault` is `{received}` (from the command line)\n  {detail}"


# --- kvrelay agent -----------------------------------------------------------------------------------------------

INSECURE_AGENT = "warning: `--insecure` is on: whoever reaches these ports can read the token ids of cached prompts"


def agent_ready(worker_url: str, endpoint: str, snapshots: str) -> str:
    return (
        f"kvrelay agent beside {worker_url}: heartbeats on {endpoint}, snapshots on {snapshots}\n"
        f'hint: tell the gateway with `agent = "{endpoint}"` under the worker\'s [[workers]]'
    )


def unusable_endpoint(endpoints: str, reason: str) -> str:
    return (
        f"error: cannot listen on or connect to one of {endpoints}: {reason}\nhint: `auto` takes a free loopback port"
    )


# --- kvrelay chaos -----------------------------------------------------------------------------------------------


def bad_script(source: str, detail: str) -> str:
    return f"error: cannot obey {source}: {detail}"


def publisher_missing(endpoint: str, waited_s: float) -> str:
    return f"warning: no publisher at `{endpoint}` after {waited_s:g} s; going on, and waiting for it"


# --- kvrelay demo and tune ---------------------------------------------------------------------------------------


def run_planned(plan: Plan, arms: int) -> str:
    """Said before the first arm, so that a run that breaks off can be repeated."""
    sessions = f"{plan.requests} requests of {len(plan.sessions)} sessions ({plan.prompt_tokens:,} prompt tokens)"
    return f"seed {plan.seed}; {arms} {'arm' if arms == 1 else 'arms'} each with {sessions}"


def arm_ended(facts: ArmFacts) -> str:
    return f"arm {facts.arm}: {facts.samples} requests, {facts.wall_s:.1f} s"


STOPPED = "stopped: every process of the run has ended; what was measured so far is in the output folder"


def unreadable_trace(path: object, reason: str, *, bundled: str) -> str:
    """`bundled` is how this command is told to use the trace that comes with the package."""
    return f"error: cannot read trace `{path}`: {reason}\nhint: {bundled} the bundled agent sessions are used"


def bad_trace(path: object, line: int, found: str, legal: str) -> str:
    """A file that is no trace: which line, what was found, what would be right."""
    return f"error: `{path or 'the trace'}`, line {line}: {found}\n  legal: {legal}"


TRACE_FLAGS = {"block_size": "--block-size 16", "rows": "--rows cumulative", "time_unit": "--time-unit s"}


def untold_trace(path: object, line: int, found: str, legal: str, option: str) -> str:
    """A file that can be read in more than one way; the answer is written down once, in our own format."""
    return (
        f"error: `{path}`, line {line}: {found}\n"
        f"  needed: {legal}; it is not guessed, because reuse depends on it\n"
        f"hint: kvrelay trace convert {path} {TRACE_FLAGS[option]} --out told.jsonl, and then use that file"
    )


def unwritable_folder(path: object, reason: str) -> str:
    return f"error: cannot write to `{path}` (from `--out`): {reason}\nhint: name another folder with `--out DIR`"


def arm_failed(detail: str) -> str:
    """The fleet or gateway of an arm could not be run, so there is nothing to compare."""
    return f"error: an arm could not be run: {detail}\nhint: the logs are in the output folder, under `arms/`"


def demo_story(table: str, won: str, why: str, receipt_words: str, out: object) -> str:
    return (
        f"MOCK RUN: modelled times on mock workers, not the performance of any engine\n\n{table}\n\n{won}\n{why}\n\n"
        f"One request, in words:\n{_indented(receipt_words)}\n\n"
        f"{out}/report.html has the charts; beside it are manifest.json, receipts.jsonl, samples.jsonl, summary.json\n"
    )


def demo_complaints(complaints: Iterable[str]) -> str:
    return "\n".join(f"error: {complaint}" for complaint in complaints)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())


def sender_was_late(policy: str, lag_p99_ms: float) -> str:
    return (
        f"warning: under {policy} our own client sent requests late (p99 {lag_p99_ms:.0f} ms): this machine is busy\n"
        "hint: close other programs and run again, or compare `ttft_sent_ms` in summary.json"
    )


def tune_needs_one_trace() -> str:
    return (
        "error: `kvrelay tune` needs one trace: a file, or `--demo` for the bundled agent sessions\n"
        "hint: kvrelay tune --demo"
    )


# --- kvrelay doctor ----------------------------------------------------------------------------------------------

VERDICT_WORDS = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "unknown": "unknown", "not_applicable": "-"}


def nothing_to_examine() -> str:
    return (
        "error: there is nothing to examine\n"
        "  legal: a configuration with [[workers]], `--worker URL`, or `--router URL` of a gateway's admin port\n"
        "hint: kvrelay doctor --worker http://127.0.0.1:8100"
    )


def examining(workers: int, router: str | None, *, probes: bool) -> str:
    """Said before anything is asked, because probes are work for the workers."""
    whom = f"{workers} worker{'' if workers == 1 else 's'}" + (
        "" if router is None else f" and the gateway at {router}"
    )
    if not probes:
        return f"examining {whom}; no request is sent (`--no-probe`), so events and hits cannot be seen"
    return f"examining {whom}; each worker gets two small requests of made-up token ids (`--no-probe`: none)"


def finding_explained(setting: str, cause: str | None, fix: str | None) -> list[str]:
    """The lines under a finding that is not well."""
    indent = " " * 10
    lines = [] if cause is None else [f"{indent}cause: {cause}"]
    return lines if fix is None else [*lines, f"{indent}fix ({setting}): {fix}"]


def doctor_verdict(verdict: str, counts: dict[str, int]) -> str:
    shown = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    return f"verdict: {verdict} ({', '.join(shown)})"


# --- kvrelay serve -----------------------------------------------------------------------------------------------


def gateway_ready(url: str, admin_url: str, config: Config, *, seed: int) -> str:
    """What the gateway listens on and does, with where that was decided."""
    gateway = config.gateway
    policy = f"{gateway.policy} ({config.source_of('gateway.policy')})"
    workers = ", ".join(f"{worker.name} {worker.url}" for worker in config.workers) or "none yet"
    lines = [
        f"kvrelay gateway on {url}, admin on {admin_url}",
        f"  policy {policy}; seed {seed}" + (f"; {gateway.processes} processes" if gateway.processes > 1 else ""),
        f"  workers: {workers}",
    ]
    if gateway.insecure:
        lines.append("warning: `gateway.insecure` is true: listeners beyond loopback need no TLS and no credentials")
    if not config.workers:
        lines.append(f'hint: add one with POST {admin_url}/admin/workers {{"url": "http://127.0.0.1:8100"}}')
    return "\n".join(lines)


def gateway_draining(grace_s: float) -> str:
    return f"draining: no new requests; open ones may end within {grace_s:g} s (a second signal ends them now)"


def gateway_cut(open_requests: int) -> str:
    return f"warning: {open_requests} open requests were cut; their receipts say so"


def config_reloaded(generation: int, needs_restart: Iterable[str]) -> str:
    """SIGHUP was obeyed; what could not be is named."""
    lines = [f"configuration {generation} is in force; open requests go on"]
    waiting = ", ".join(f"`{key}`" for key in needs_restart)
    if waiting:
        lines.append(f"warning: changed in the file, but not while running: {waiting}\nhint: restart to change them")
    return "\n".join(lines)


def config_not_reloaded(problem: str, generation: int) -> str:
    return f"{problem}\nwarning: nothing was changed, configuration {generation} stays in force"


def unsafe_listener(detail: str) -> str:
    return (
        f"error: {detail}\n"
        "  legal: a loopback address, or protection as named above\n"
        "hint: `insecure = true` under [gateway] allows it without protection"
    )


def gateway_did_not_start(problem: Exception) -> str:
    """An address is the usual reason, and the only one for which other ports are a remedy."""
    if not isinstance(problem, OSError) or problem.errno != errno.EADDRINUSE:
        return f"error: the gateway could not start: {_reason(problem)}"
    address = re.search(r"\('(?P<host>[^']+)', (?P<port>\d+)", str(problem))
    where = f"{address['host']}:{address['port']}" if address else "an address"
    return (
        f"error: the gateway could not start: {where} is in use by another process\n"
        "hint: name other ports with `--port` and `--admin-port`; 0 takes free ones"
    )


def metrics_found(found: Survey) -> str:
    """One line per canonical metric: its name on the page, or that the page does not carry it."""
    lines = [f"{found.url}: {found.engine}, version {found.version or 'unknown'}"]
    if not found.has_page:
        lines.append("warning: it has no /metrics page")
    rows = [(one.canonical, one.name or "unavailable", one.unit) for one in found.metrics]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines += [f"  {canonical:<{widths[0]}}  {name:<{widths[1]}}  {unit}" for canonical, name, unit in rows]
    return "\n".join(lines) + "\n"


def worker_says_nothing(url: str, reason: str) -> str:
    return f"error: `{url}` cannot be asked: {reason}\nhint: is it the base URL of a running worker?"
